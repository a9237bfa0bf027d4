"""IREE's code generator: tiles as tuning specs, compiled and run; tuning of models."""
