"""Grafana dashboards as code: `python -m specstack_serving.dashboards` writes their JSON.

The boards are plain data over checked queries; only `grafana` knows the tool that draws them.
"""
