"""What a run does while it runs: where time goes, what is held and moved, which rank is slow."""

from zerohvd.monitoring.sinks import ConsoleSink, CsvSink, JsonLinesSink, Sink
from zerohvd.monitoring.tensorboard import TensorBoardSink

__all__ = ["ConsoleSink", "CsvSink", "JsonLinesSink", "Sink", "TensorBoardSink"]
