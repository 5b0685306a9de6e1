class _Cpu:
    def is_sleep_mode_available(self) -> bool:
        return False


current_platform = _Cpu()
