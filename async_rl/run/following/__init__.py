"""What follows a run while it is written: the sinks of ``log.to``, what feeds them, and the process that does both."""
