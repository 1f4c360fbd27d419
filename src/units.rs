//! Numbers with units, for people.

use std::time::Duration;

/// Bytes with a binary unit: `"1.5 MiB"`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// Seconds, or milliseconds below one second: `"12.3 ms"`.
pub fn time(t: Duration) -> String {
    if t.as_secs() == 0 { format!("{:.1} ms", t.as_secs_f64() * 1e3) } else { format!("{:.2} s", t.as_secs_f64()) }
}

/// The number and its noun: `"1 token"`, `"5 tokens"`.
pub fn count(n: usize, noun: &str) -> String {
    if n == 1 { format!("1 {noun}") } else { format!("{n} {noun}s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_switch_at_their_size() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1024), "1.0 KiB");
        assert_eq!(bytes(1536 << 20), "1.5 GiB");
        assert_eq!(bytes(u64::MAX), "16777216.0 TiB");
        assert_eq!(time(Duration::from_micros(999_940)), "999.9 ms");
        assert_eq!(time(Duration::from_millis(1250)), "1.25 s");
        assert_eq!(count(1, "token"), "1 token");
        assert_eq!(count(0, "token"), "0 tokens");
    }
}
