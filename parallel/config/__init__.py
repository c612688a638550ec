"""What a run is: settings in, a checked `RunSpec` out. Torch-free.

Read layout.py (how a step is split), then run_spec.py (a run, every setting) with resolve.py (how
users say it), and engine_abilities.py with refusals.py (why it cannot start). study.py and
run_names.py make many runs, changes.py says how two of them differ, clusters.py where they run.
data_files.py, deepspeed_json.py, megatron_options.py and library_variables.py are what others
define.
"""
