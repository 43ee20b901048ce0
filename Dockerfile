# The trainers as an image. In the repository:
#
#     docker build -t minimind .                              for CPUs: under 1 GB
#     docker build -t minimind:cuda --build-arg TORCH=cuda .  for NVIDIA GPUs (docker run --gpus all)
#     docker run -v "$PWD:/data" -v minimind:/minimind/out minimind --data_path /data/my.jsonl --budget 1h
#     docker run -v minimind:/minimind/out --entrypoint python minimind scripts/generate.py "Return the"
#
# LEFT_OUT: packages that few runs need, for the gigabyte (Parquet, GLUE, intervals of evaluate.py, W&B); --build-arg LEFT_OUT=none
FROM python:3.11-slim-bookworm AS packages
ARG TORCH=cpu
ARG LEFT_OUT=pyarrow|scikit-learn|scipy|wandb
RUN apt-get update && apt-get install -y --no-install-recommends binutils make
WORKDIR /build
COPY Makefile requirements.txt ./
# Tests, debuggers' symbols and .pyc files are half a gigabyte. Libraries in .libs/ and nvidia/ were changed by their makers.
ENV PIP_COMPILE=0 PIP_NO_CACHE_DIR=1
RUN sed -i -E "/^($LEFT_OUT)==/d" requirements.txt && make VENV=/opt/venv TORCH=$TORCH /opt/venv/.installed
RUN cd /opt/venv/lib/python3.11/site-packages \
    && rm -rf torch/test torch/bin/test_* torch/bin/*Test torch/bin/protoc* \
    && find . \( -name tests -o -name __pycache__ \) -prune -exec rm -r {} + \
    && find . -name "*.so*" -not -path "*.libs/*" -not -path "./nvidia/*" -exec strip --strip-unneeded {} +

FROM python:3.11-slim-bookworm
ARG TORCH=cpu
# The compiler of torch.compile. On a CPU it compiles C++ alone.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -r /var/lib/apt/lists/* \
    && cd /usr/lib && rm -f gcc/*/*/lto1 ../bin/*-lto-dump-* */lib*san.so.* gcc/*/*/lib*san.a gcc/*/*/libstdc++.a */libc.a \
    && if [ "$TORCH" = cpu ]; then rm gcc/*/*/cc1; fi
COPY --from=packages /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
RUN useradd --uid 1000 --create-home minimind && mkdir /data /minimind && chown minimind /data /minimind
USER 1000
WORKDIR /minimind
COPY --chown=1000 . .
VOLUME ["/data", "/minimind/out"]
ENTRYPOINT ["python", "trainer/train_pretrain.py"]
