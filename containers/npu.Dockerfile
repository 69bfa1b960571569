# sglcore on Ascend NPUs: docker build -f containers/npu.Dockerfile -t sglcore:npu .
FROM quay.io/ascend/cann:9.1.0-910b-ubuntu22.04-py3.12 AS build
# The native kernels of the processor are compiled here, for every instruction set.
RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/sglcore/source
COPY . .
RUN python3 -m venv /opt/sglcore/venv \
 && PIP_NO_CACHE_DIR=1 SGLCORE_CPU_BUILD=all /opt/sglcore/venv/bin/python tools/install_devices.py --device npu

FROM quay.io/ascend/cann:9.1.0-910b-ubuntu22.04-py3.12
# The toolkit is the image's, the driver is mounted from the host.
RUN useradd --uid 10001 --create-home --home-dir /home/sglcore sglcore \
 && install -d -o sglcore -g sglcore /models
COPY --from=build /opt/sglcore /opt/sglcore
ENV PATH=/opt/sglcore/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/models \
    SGLCORE_HOST=0.0.0.0 \
    SGLCORE_PORT=8000
USER 10001
WORKDIR /home/sglcore
VOLUME /models
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
  CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ['SGLCORE_PORT']}/readyz\", timeout=4)"]
# The toolkit says by variables where it is.
ENTRYPOINT ["bash", "-c", "source /usr/local/Ascend/ascend-toolkit/set_env.sh && exec sglcore \"$@\"", "sglcore"]
CMD ["serve"]
