"""Values beside the tensors: as JSON, compared with those they replace, and generators."""
