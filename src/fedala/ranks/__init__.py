"""One run in several processes, each with its GPU: torchrun starts them, and rank 0 leads.

Rank 0 has the round loop, the servers and the run folder. Every rank, also rank 0, has a share of
the clients with their states, and does their part of a round. It is another transport of the
round's work, next to threads and Flower.
"""
