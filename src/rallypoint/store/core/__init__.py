"""What a store server answers, pure: no socket, no clock, no thread. Bytes and times in, bytes out."""
