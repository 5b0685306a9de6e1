class EngineDeadError(Exception):
    def __init__(self) -> None:
        super().__init__("EngineCore encountered an issue.")
