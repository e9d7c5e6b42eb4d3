# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# verl's image with vLLM, plus verl 0.9.1 and this package. This project has not built the image.
#
#   docker build -t fspo_verl .
#   docker run --rm -it --gpus all --net=host --shm-size=10g --cap-add=SYS_ADMIN -v "$PWD":/work -w /work fspo_verl bash
#
# The images are listed at https://hub.docker.com/r/verlai/verl; they hold what verl needs, and leave verl itself to you.
ARG BASE=verlai/verl:vllm024.dev2
FROM ${BASE}
COPY . /opt/fspo_verl
# verl without dependencies: the image has them, in versions that belong together. Of this package, what is missing.
RUN pip install --no-deps verl==0.9.1 && pip install "/opt/fspo_verl[report]" \
    && python3 -c "import importlib.metadata as m; assert any(e.value == 'fspo_verl.plugin' for e in m.entry_points(group='verl.plugins'))"
