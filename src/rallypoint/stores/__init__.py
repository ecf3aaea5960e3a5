"""The stores that people use: one interface, `base.Store`, over TCP, a file, or this process's memory."""
