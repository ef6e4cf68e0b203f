"""Real machine parts under control: memory with a limit, emulated links, system calls, cores kept awake."""
