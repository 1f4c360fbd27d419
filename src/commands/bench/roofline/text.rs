//! The report of `bench roofline` as text.

use super::RooflineReport;
use metal_attention::backends::Launches;

use super::floors::Floor;

/// The report as lines.
pub fn of(report: &RooflineReport) -> String {
    let device = &report.device;
    let mut text = vec![format!("{}: {}", device.kind, device.name)];
    text.extend(device.threads.map(|n| format!(", threads: {n}")));
    text.extend(device.driver.as_ref().map(|driver| format!(", {driver}")));
    text.push("\n\nceilings\n".into());
    let mut line = |what: &str, value: String| text.push(format!("  {what:<44}  {value:>12}\n"));
    let ceilings = &report.ceilings;
    let giga = |rate: f64, unit: &str| format!("{:.1} {unit}", rate / 1e9);
    line("read", giga(ceilings.read_bytes, "GB/s"));
    line("copy (bytes read and written)", giga(ceilings.copy_bytes, "GB/s"));
    if let (Some(rate), Some(ty)) = (ceilings.matrix, ceilings.matrix_type) {
        line(&format!("{ty} multiplications"), giga(rate, "G/s"));
    }
    line("f32 multiplications", giga(ceilings.f32, "G/s"));
    let us = |us: f64| format!("{us:.2} us");
    match ceilings.launches {
        Launches::Cpu { region_us } => line("parallel region", us(region_us)),
        Launches::Wgpu { dispatch_us, dispatch_queued_us, submission_us, submission_queued_us } => {
            line("dispatch inside a submission", us(dispatch_us));
            line("  in submissions queued ahead", us(dispatch_queued_us));
            line("submission, waited for", us(submission_us));
            line("  queued ahead", us(submission_queued_us));
        }
        Launches::Cuda { kernel_in_graph_us, kernel_us, round_trip_us, graph_us } => {
            line("kernel in a graph", us(kernel_in_graph_us));
            line("kernel launched by itself", us(kernel_us));
            line("  until its result is read", us(round_trip_us));
            line("graph of one kernel", us(graph_us));
        }
    }
    let scaling = &report.batch_scaling;
    text.push(format!(
        "\ntokens multiplied at once with {} {} [{}, {}], {} of them\n  {:>6}  {:>12}  {:>8}\n",
        scaling.matrix, scaling.ty, scaling.n_out, scaling.n_in, scaling.layers, "tokens", "us per token", "speed-up"
    ));
    for batch in &scaling.batches {
        text.push(format!("  {:>6}  {:>12.2}  {:>7.2}x\n", batch.n_tokens, batch.us_per_token, batch.speedup));
    }
    text.push(format!(
        "\n{}: {:.1} MB of matrices, {:.1} million elements\n",
        report.model.file,
        report.model.matrix_bytes as f64 / 1e6,
        report.model.matrix_elements as f64 / 1e6
    ));
    text.push(format!(
        "  {:<12}  {:>10}  {:>10}  {:>10}  {:<15}  {:>10}  {:>11}  {:>7}\n",
        "", "bytes us", "mult. us", "launch us", "bound by", "floor t/s", "reached t/s", "%"
    ));
    text.extend(report.floors.iter().map(floor_line));
    text.concat()
}

/// The table's line of one phase.
fn floor_line(floor: &Floor) -> String {
    let n = if floor.n_gen > 0 { floor.depth } else { floor.n_prompt };
    let phase = if floor.n_gen > 0 { format!("decode @{n}") } else { format!("prefill {n}") };
    format!(
        "  {phase:<12}  {:>10.1}  {:>10.1}  {:>10.1}  {:<15}  {:>10.0}  {:>11.0}  {:>7.1}\n",
        floor.bytes_us,
        floor.multiplications_us,
        floor.launches_us,
        floor.bound,
        floor.floor_tokens_per_second,
        floor.tokens_per_second,
        floor.percent
    )
}

#[cfg(test)]
mod tests {
    use super::super::ceilings::{BatchScaling, BatchTiming, Ceilings, DeviceName};
    use super::super::floors::{ModelSize, WorkCounts};
    use super::*;

    #[test]
    fn the_report_of_fixed_numbers() {
        let report = RooflineReport {
            version: "1",
            device: DeviceName {
                kind: "gpu",
                name: "Some GPU".into(),
                threads: None,
                driver: Some("vulkan, 1.2".into()),
            },
            ceilings: Ceilings {
                read_bytes: 4.31e12,
                copy_bytes: 3.9e12,
                matrix: Some(2.5e14),
                matrix_type: Some("half"),
                f32: 3e13,
                launches: Launches::Wgpu {
                    dispatch_us: 1.81,
                    dispatch_queued_us: 2.5,
                    submission_us: 45.0,
                    submission_queued_us: 9.125,
                },
            },
            batch_scaling: BatchScaling {
                matrix: "blk.0.ffn_up.weight".into(),
                ty: "Q4_0",
                n_out: 1536,
                n_in: 576,
                layers: 30,
                batches: vec![
                    BatchTiming { n_tokens: 1, us_per_token: 4.0, speedup: 1.0 },
                    BatchTiming { n_tokens: 16, us_per_token: 0.5, speedup: 8.0 },
                ],
            },
            model: ModelSize { file: "m.gguf".into(), matrix_bytes: 90_500_000, matrix_elements: 134_000_000 },
            floors: vec![Floor {
                phase: "decode",
                n_prompt: 0,
                n_gen: 64,
                depth: 0,
                work: WorkCounts { bytes: 1, matrix_multiplications: 1, f32_multiplications: 1, launches: 154 },
                bytes_us: 21.0,
                multiplications_us: 0.5,
                launches_us: 278.7,
                floor_us: 278.7,
                bound: "launches",
                measured_us: 600.0,
                floor_tokens_per_second: 3588.0,
                tokens_per_second: 1666.7,
                percent: 46.45,
            }],
        };
        let expected = "\
gpu: Some GPU, vulkan, 1.2

ceilings
  read                                           4310.0 GB/s
  copy (bytes read and written)                  3900.0 GB/s
  half multiplications                          250000.0 G/s
  f32 multiplications                            30000.0 G/s
  dispatch inside a submission                       1.81 us
    in submissions queued ahead                      2.50 us
  submission, waited for                            45.00 us
    queued ahead                                     9.12 us

tokens multiplied at once with blk.0.ffn_up.weight Q4_0 [1536, 576], 30 of them
  tokens  us per token  speed-up
       1          4.00     1.00x
      16          0.50     8.00x

m.gguf: 90.5 MB of matrices, 134.0 million elements
                  bytes us    mult. us   launch us  bound by          floor t/s  reached t/s        %
  decode @0           21.0         0.5       278.7  launches               3588         1667     46.5
";
        assert_eq!(of(&report), expected);
    }
}
