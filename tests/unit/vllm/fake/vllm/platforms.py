class _Platform:
    def is_sleep_mode_available(self) -> bool:
        return False

    def is_cpu(self) -> bool:
        return True

    def is_unspecified(self) -> bool:
        return False


current_platform = _Platform()
