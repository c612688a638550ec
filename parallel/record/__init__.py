"""What a run leaves behind: its folder, facts, launch and watchdog. Torch-free."""
