"""Every backward: dispatch to a captured or eager run, gradient hooks, checks between ranks, and the hang monitor."""
