"""
At which learning rates does each mixer recall? Published windows (Okpekpe and Orvieto 2025), with and without a gate.

recall.py's task at five rates, the first 600 steps of a run each, on seeds of their own: accuracy at the end against
the rate is the figure windows.png. Published, at other sizes: recurrent mixers recall in a narrow window of rates,
attention in a wide one. A mixer's window is here the rates at which all three seeds are over 90%. Three seeds are a
look: no claim is judged. One seed at each chosen rate goes on to the end.
"""

include = "recall.py"

name = "recall_windows"
seeds = [110]
variants = {"none": {}, "sigmoid": {"gate": "elementwise"}}
arms = {}
learning_rates = [1e-3, 3e-3, 1e-2, 3e-2, 1e-1]
selection_seeds = [111, 112, 113]
pool_rates = False
claims = {}
