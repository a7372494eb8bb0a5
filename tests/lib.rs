//! The suites that need real parts; each is a test target beside this file. Shared helpers belong in `imp-testkit`.
