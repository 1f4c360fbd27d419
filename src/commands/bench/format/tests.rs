//! Snapshots of the formats: files in tests/data/bench. `UPDATE_SNAPSHOTS=1 cargo test` rewrites them.

use std::path::Path;

use super::super::report::{BenchSettings, EngineInfo, MachineInfo, SkippedTest, TokensPerSecond};
use super::*;

fn result(phase: Phase, [n_prompt, n_gen, depth, batch, threads]: [usize; 5], samples: &[f64]) -> BenchResult {
    BenchResult {
        model: "small|one, q4_0.gguf".into(),
        model_sha256: "5f0e".into(),
        phase,
        n_prompt,
        n_gen,
        depth,
        batch,
        threads,
        device: "cpu".into(),
        device_name: "Some CPU, avx2".into(),
        driver: None,
        tokens_per_second: TokensPerSecond::new(samples.to_vec()).unwrap(),
        comparison: None,
    }
}

/// An invented report that has every kind of field.
fn report(compared: bool) -> BenchReport {
    let mut results = vec![
        result(Phase::Prefill, [512, 0, 0, 1, 2], &[4000.0, 4100.0, 3900.0]),
        result(Phase::Decode, [0, 100, 1024, 1, 2], &[400.25, 401.75, 400.5]),
        result(Phase::Decode, [0, 100, 0, 16, 1], &[1.5]),
    ];
    results.push(BenchResult {
        device: "gpu:0".into(),
        device_name: "Some GPU".into(),
        driver: Some("1.2.3 \"beta\"".into()),
        ..results[1].clone()
    });
    if compared {
        let comparison = |ratio, noise, moved| Some(ResultComparison { earlier_median: 320.0, ratio, noise, moved });
        results[0].comparison = comparison(12.5, Some(0.0425), true);
        results[1].comparison = comparison(0.9525, Some(0.02), true);
        results[2].comparison = comparison(1.5, None, false);
    }
    BenchReport {
        schema_version: 1,
        engine: EngineInfo {
            name: "metal-attention".into(),
            version: "0.0.0".into(),
            commit: Some("0123456789ab".into()),
        },
        machine: MachineInfo {
            os: "linux".into(),
            arch: "x86_64".into(),
            cpu: Some("Some CPU".into()),
            simd: "avx2".into(),
            physical_cores: 2,
        },
        unix_time: 1_700_000_000,
        settings: BenchSettings {
            iterations: 3,
            warmup: 1,
            cache_type: "f16".into(),
            exact: false,
            n_ubatch: Some(512),
        },
        results,
        skipped: vec![SkippedTest {
            model: "small|one, q4_0.gguf".into(),
            phase: Phase::Prefill,
            n_prompt: 9999,
            n_gen: 0,
            depth: 0,
            batch: 1,
            reason: "too long".into(),
        }],
        interrupted: compared,
    }
}

#[track_caller]
fn assert_snapshot(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/bench").join(name);
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        std::fs::write(&path, text).unwrap();
    }
    // A checkout may have converted line breaks.
    let expected = std::fs::read_to_string(&path).unwrap().replace("\r\n", "\n");
    assert_eq!(text, expected, "{}", path.display());
}

#[test]
fn formats_match_the_snapshots() {
    let (plain, compared) = (report(false), report(true));
    assert_snapshot("table.txt", &text(&plain));
    assert_snapshot("table-compared.txt", &text(&compared));
    assert_snapshot("table.md", &markdown(&plain));
    assert_snapshot("table-compared.md", &markdown(&compared));
    assert_snapshot("report.csv", &csv(&plain).unwrap());
    assert_snapshot("report-compared.csv", &csv(&compared).unwrap());
    assert_snapshot("report.json", &json(&plain).unwrap());
    assert_snapshot("report-compared.json", &json(&compared).unwrap());
}

#[test]
fn json_reads_back() {
    for report in [report(false), report(true)] {
        assert_eq!(serde_json::from_str::<BenchReport>(&json(&report).unwrap()).unwrap(), report);
    }
}

#[test]
fn nothing_measured_is_an_empty_report() {
    let nothing = BenchReport { results: Vec::new(), skipped: Vec::new(), ..report(false) };
    assert_eq!(csv(&nothing).unwrap(), "");
    assert_eq!(text(&nothing).lines().count(), 4);
}

/// Checks `value` against `schema`, using the part of JSON Schema that docs/bench.schema.json needs.
fn check(schema: &serde_json::Value, value: &serde_json::Value, at: &str) {
    let kind = match value {
        serde_json::Value::Null => "null",
        serde_json::Value::Bool(_) => "boolean",
        serde_json::Value::Number(n) if n.is_u64() => "integer",
        serde_json::Value::Number(_) => "number",
        serde_json::Value::String(_) => "string",
        serde_json::Value::Array(_) => "array",
        serde_json::Value::Object(_) => "object",
    };
    let allowed = match &schema["type"] {
        serde_json::Value::Array(kinds) => kinds.iter().filter_map(|k| k.as_str()).collect(),
        other => vec![other.as_str().unwrap_or_else(|| panic!("{at} has no type"))],
    };
    assert!(allowed.contains(&kind) || kind == "integer" && allowed.contains(&"number"), "{at} is a {kind}");
    if let Some(names) = schema["enum"].as_array() {
        assert!(names.contains(value), "{at}: {value}");
    }
    for (i, item) in value.as_array().into_iter().flatten().enumerate() {
        check(&schema["items"], item, &format!("{at}[{i}]"));
    }
    if let Some(object) = value.as_object() {
        for name in schema["required"].as_array().unwrap() {
            assert!(object.contains_key(name.as_str().unwrap()), "{at} lacks {name}");
        }
        for (name, value) in object {
            check(&schema["properties"][name], value, &format!("{at}.{name}"));
        }
    }
}

#[test]
fn reports_follow_the_schema() {
    let schema = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/bench.schema.json")).unwrap();
    let schema: serde_json::Value = serde_json::from_str(&schema).unwrap();
    for report in [report(false), report(true)] {
        check(&schema, &serde_json::to_value(report).unwrap(), "report");
    }
}
