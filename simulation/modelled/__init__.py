"""What is modelled: network, sockets, memory, transports, event loops, and strangers."""
