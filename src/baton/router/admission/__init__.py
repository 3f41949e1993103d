"""Which waiting request runs next: classes, tenants' shares and deadlines."""
