# syntax=docker/dockerfile:1
# docker build --target cpu -t specstack:cpu .
# docker build --target cuda -t specstack:cuda .
# Base images are pinned by tag, not by digest; pin the digest that you tested.

FROM python:3.12-slim-bookworm AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY specstack specstack
COPY dsl dsl
COPY kernels kernels
COPY loadtest loadtest
COPY serving serving
RUN python -m venv /opt/build \
    && /opt/build/bin/python -m pip install --no-cache-dir "setuptools>=77" \
    && /opt/build/bin/python -m pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM python:3.12-slim-bookworm AS cpu
# A C compiler: torch compiles small kernels where it runs.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential libnuma1 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=wheel /wheels /wheels
RUN python -m venv /opt/specstack \
    && wheel="$(ls /wheels/*.whl)" \
    && /opt/specstack/bin/python -m pip install --no-cache-dir "$wheel[serve]" \
    && rm -rf /wheels
COPY dsl/specs /etc/specstack/specs
RUN useradd --create-home --uid 10001 specstack \
    && mkdir -p /var/cache/specstack \
    && chown specstack:specstack /var/cache/specstack
ENV PATH=/opt/specstack/bin:$PATH SPECSTACK_CACHE=/var/cache/specstack HEALTH_PORT=30000
USER specstack
WORKDIR /home/specstack
VOLUME /var/cache/specstack
EXPOSE 30000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.build_opener(u.ProxyHandler({})).open('http://127.0.0.1:' + os.environ['HEALTH_PORT'] + '/health', timeout=4)"]
ENTRYPOINT ["specstack", "serve"]
CMD ["/etc/specstack/specs/quickstart.yaml", "--set", "engine.host=0.0.0.0"]

# The development image: Triton and FlashInfer compile kernels where they run.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS cuda
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential libnuma1 python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY --from=wheel /wheels /wheels
RUN python3 -m venv /opt/specstack \
    && wheel="$(ls /wheels/*.whl)" \
    && /opt/specstack/bin/python -m pip install --no-cache-dir "$wheel[serve]" \
    && rm -rf /wheels
COPY dsl/specs /etc/specstack/specs
RUN useradd --create-home --uid 10001 specstack \
    && mkdir -p /var/cache/specstack \
    && chown specstack:specstack /var/cache/specstack
ENV PATH=/opt/specstack/bin:$PATH SPECSTACK_CACHE=/var/cache/specstack HEALTH_PORT=30000
USER specstack
WORKDIR /home/specstack
VOLUME /var/cache/specstack
EXPOSE 30000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.build_opener(u.ProxyHandler({})).open('http://127.0.0.1:' + os.environ['HEALTH_PORT'] + '/health', timeout=4)"]
ENTRYPOINT ["specstack", "serve"]
CMD ["/etc/specstack/specs/quickstart.yaml", "--set", "engine.host=0.0.0.0", "--set", "engine.device=cuda"]
