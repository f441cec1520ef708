"""The control in other trainers: one file per host, which sees `control` and nothing else.

- trl.py, lightning.py      callbacks
- verl.py, torchtitan.py    install(control): at the one place where the host steps
- deepspeed.py, megatron.py attach(engine or optimizer, control): gradients that are not in p.grad
- auto.py                   any other trainer: the first policy optimizer that steps
- hosts.py                  is the host's version known, is the place still there
- records.py                what becomes of records
"""
