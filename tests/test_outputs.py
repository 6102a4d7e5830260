"""What scripts may write over: an output replaces nothing but an older output of its own kind, and follows no link."""

import json
import os
import shutil
import zipfile
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

import bench
import evaluate
import experiment
import export
import meters
import plot
from configurator import UserError
from data import writing
from data.mqar import prepare as mqar_prepare
from data.text import prepare as text_prepare
from runs import files
from study import drawing, page, report, runner, token_page
