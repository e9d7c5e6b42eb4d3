#!/usr/bin/env bash
# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# bash scripts/quickstart.sh [--help] [options]
#
# Trains a small model with FSPO on stock verl, on a machine with nothing but Python 3.10 to 3.12. See --help.
RUN=scripts/quickstart/run.py EXTRAS=report
source "$(dirname "$0")/training/start.sh"
