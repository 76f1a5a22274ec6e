"""One rank's engine: model, attention, checkpoint, CPU runtime, sampling, requests."""
