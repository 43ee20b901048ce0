"""What --budget does: it plans a run for the machine that it has timed (the clock of the run is clock.py).

Planning is built on pretraining (trainer/pretrain): it asks what a job reads, how much memory it takes and how fast it is. A job
takes from here laws, the clock, the settings and the place of its plan. Only trainer/pretrain/command.py
stands above both: it plans, and then trains.
"""
