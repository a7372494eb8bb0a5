//! Regular expressions of the schemas (RE2 syntax, as the API server matches them).

/// A name of a namespaced or cluster-scoped object: RFC 1123 subdomain.
pub(crate) const NAME: &str = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$";

/// An IPv4 address with possible octets and no leading zeros.
pub(crate) const IPV4: &str =
    r"^((25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])$";

/// An IPv4 network in CIDR notation with possible octets and a possible prefix length.
pub(crate) const IPV4_CIDR: &str = r"^((25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])/(3[0-2]|[12]?[0-9])$";

/// A duration as Go writes it: `90s`, `1h30m`, `1.5h`; or a bare `0`.
pub(crate) const DURATION: &str = r"^(0|([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+)$";

/// A decimal fraction from 0 to 1.
pub(crate) const FRACTION: &str = r"^(0(\.[0-9]+)?|1(\.0+)?)$";

/// An absolute path of an HTTP request.
pub(crate) const HTTP_PATH: &str = r"^/[^\s]*$";

/// An absolute path of a file system.
pub(crate) const ABSOLUTE_PATH: &str = r"^/[^\x00]*$";

/// A name of a Linux network interface (at most 15 bytes, no slash, no white space).
pub(crate) const INTERFACE: &str = r"^[^\s/]+$";
