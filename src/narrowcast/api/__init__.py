"""The public Python API, which `narrowcast` exports: functions, namespaces of classes, and jobs of a cluster."""
