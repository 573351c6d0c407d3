"""What happens in a backward: a captured or an eager run, gradient hooks, checks between ranks, a monitor for hangs."""
