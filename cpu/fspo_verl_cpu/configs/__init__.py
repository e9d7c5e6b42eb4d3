# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
