"""Sharded parameters: units that are gathered before they run and freed after."""
