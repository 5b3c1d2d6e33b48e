# An image of `prep`, for every environment of docs/cluster.md; KubeRay too starts it as it is. In the checkout:
#
#     docker build --file deploy/prep.Dockerfile --tag clipmill-prep .
#     docker build --file deploy/prep.Dockerfile --tag clipmill-columns --build-arg PART=columns .
#     docker run --rm --volume "$PWD/data:/data/data" clipmill-prep chunk --len 15s
#
# PART=columns adds torch, for latents, text embeddings and captions by models. Nothing is compiled: all packages are
# wheels with the hashes of the lock. BASE may be another Debian with Python 3.11 to 3.13 as `python`.
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
ARG PART=prep
WORKDIR /clipmill
COPY requirements-uv.lock requirements-${PART}.lock ./
RUN python -m venv uv
RUN uv/bin/python -m pip install --quiet --require-hashes --requirement requirements-uv.lock
RUN python -m venv --without-pip venv
RUN uv/bin/uv pip sync --quiet --python venv/bin/python --require-hashes --only-binary :all: --compile-bytecode requirements-${PART}.lock
COPY . source
RUN uv/bin/uv pip install --quiet --python venv/bin/python --no-deps --no-build-isolation --compile-bytecode ./source

FROM ${BASE}
RUN useradd --create-home --uid 1000 clipmill && install --directory --owner clipmill /data
COPY --from=build /clipmill/venv /clipmill/venv
ENV PATH=/clipmill/venv/bin:${PATH}
ENV RAY_USAGE_STATS_ENABLED=0
USER 1000
WORKDIR /data
# The log of the build has the versions.
RUN python --version && prep --version
RUN python -c "from importlib.metadata import distributions; print(*sorted(f'{d.name}=={d.version}' for d in distributions()), sep='\n')"
ENTRYPOINT ["prep"]
CMD ["--help"]
