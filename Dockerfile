# One image, two commands: `web` (default: upgrades the database, serves the dashboard) and `worker`
# (executes runs). Both share the /data volume on one host; only the worker needs a GPU.
FROM python:3.11-slim

# Triton compiles a C launcher at run time; the base image brings Python's headers.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev tini \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /srv/peakmark

# Dependencies first, from the metadata alone, so that a change of code does not reinstall torch.
COPY pyproject.toml ./
RUN mkdir app db kernels planner runners \
    && pip install --no-cache-dir .

COPY . .
RUN pip install --no-cache-dir --no-deps -e .

RUN useradd --create-home --uid 10001 peakmark \
    && mkdir /data \
    && chown peakmark:peakmark /data
USER peakmark

ENV PEAKMARK_DATABASE_URL=sqlite:////data/peakmark.db \
    PYTHONUNBUFFERED=1
VOLUME /data
EXPOSE 8501

HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python", "scripts/healthcheck.py"]
ENTRYPOINT ["tini", "--", "scripts/entrypoint.sh"]
CMD ["web"]
