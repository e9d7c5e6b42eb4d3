#!/usr/bin/env bash
# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# bash scripts/real_model.sh [--help] [options]
#
# Trains a real pretrained language model with FSPO on stock verl, on a machine with Python 3.10 to 3.12 and a C compiler,
# or on a GPU. See --help.
# What follows changes the folder, so a model's becomes absolute.
[[ ! -d ${MODEL_PATH:-} ]] || export MODEL_PATH=$(realpath "$MODEL_PATH")
RUN=scripts/real/run.py EXTRAS=report,real MORE_REQUIREMENTS=requirements/real.txt
source "$(dirname "$0")/training/start.sh"
