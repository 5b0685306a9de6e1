"""Engine implementations behind the EngineBackend protocol."""
