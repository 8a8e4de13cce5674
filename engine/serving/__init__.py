"""Tables for others: the service and its client, readers in other processes, replicas, followers."""
