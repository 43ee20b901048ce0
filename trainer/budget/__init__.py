"""What --budget does: it plans a run for the machine that it has timed (the clock of the run is clock.py).

Planning is built on pretraining (trainer/pretrain): it asks what a job reads, how much memory it takes and how fast it is. What a
job itself takes from here (laws, clock, settings, the kept plan, the cuts of an update) knows no more of pretraining than its settings. Only
trainer/pretrain/command.py stands above both: it plans, and then trains.
"""
