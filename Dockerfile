# Calibrate on a GPU:
#   docker build -t s2o . && docker run --gpus all -v "$PWD:/data" s2o s2o-calibrate --model qwen2.5-7b --out p.safetensors
# torch brings CUDA's libraries; Triton compiles its launcher with gcc. For vLLM see docs/serving.md.
FROM python:3.12-slim
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip install --no-cache-dir '/src[calibrate]' && rm -rf /src
WORKDIR /data
CMD ["s2o-calibrate", "--help"]
