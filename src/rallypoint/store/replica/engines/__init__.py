"""The engines that keep a log: etcd and Redis, and the addresses that name them."""
