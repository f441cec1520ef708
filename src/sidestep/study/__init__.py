"""Grids of runs: lag x learning rate x method x task x seed, with their statistics and a report.

declaration  a TOML file: axes, and methods as named sets of config keys
grid         cells, what they need of each other, and the config of each
worker       a process that runs cells one after the other (the only part that loads torch)
pool         hands ready cells to workers; what is finished is never run again
outcome      a finished cell on disk, and its row in the table
merits       the figures of merit of a study, from the rows
warning      how early signals tell a collapse, and how often they are wrong
report       table.csv, merits.csv and report.html
"""
