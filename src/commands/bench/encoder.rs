//! `bench encoder`: measures how fast a device encodes a picture, against the matrix products of that alone.

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use metal_attention::picture_files::Picture;
use metal_attention::{Device, DeviceInfo, EngineOptions, Error, PictureEncoderBench};
use serde::Serialize;

use crate::cli_error::CliError;
use crate::engine_args::at_least_one;
use crate::interrupt;
use crate::map_gguf::map_gguf;
use crate::picture_args::read_picture;
use crate::progress::ProgressLine;

/// Pixels of the sides of the picture that is measured without `--image`.
const SIDE: usize = 1024;

const AFTER_HELP: &str = "\
Operations are those of matrix products, of attention and of convolutions; a multiplication with its addition counts as two. The \
products alone are those of the encoder with its weights, one after the other, on inputs that are on the device: what the encoder \
could reach if nothing were between them. Times are medians.

With --json stdout gets one object, with all samples; see docs/benchmark.md.

Examples:
  metal-attention bench encoder --mmproj mmproj.gguf
  metal-attention bench encoder --mmproj mmproj.gguf --image photo.jpg --device cpu --threads 2 --json";

/// Measure how fast pictures are encoded
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct EncoderArgs {
    /// The mmproj file
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    mmproj: PathBuf,

    /// The picture; -: from stdin [default: a generated one of 1024 x 1024 pixels]
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    image: Option<PathBuf>,

    /// Timed runs
    #[arg(long, value_name = "N", default_value = "5", value_parser = at_least_one)]
    iterations: usize,

    /// Runs before the timed ones
    #[arg(long, value_name = "N", default_value_t = 1)]
    warmup: usize,

    /// Write one JSON object
    #[arg(long)]
    json: bool,

    /// The device: auto (a GPU, preferably through CUDA, else the CPU), cpu, cuda, cuda:1, wgpu, wgpu:1 (by index), wgpu:NAME
    #[arg(long, value_name = "DEVICE", default_value = "auto", help_heading = "Engine")]
    device: Device,

    /// The same as --device wgpu
    #[arg(long, visible_alias = "gpu", conflicts_with = "device", help_heading = "Engine")]
    wgpu: bool,

    /// Threads that compute on the CPU [default: one for each physical core]
    #[arg(short, long, value_name = "N", value_parser = at_least_one, help_heading = "Engine")]
    threads: Option<usize>,

    /// Compute in F32 instead of quantising inputs to 8 bits (CPU) or using 16-bit matrix units (GPU): slower, more exact
    #[arg(long, help_heading = "Engine")]
    exact: bool,
}

impl EncoderArgs {
    /// The device with its threads and precision.
    fn options(&self) -> EngineOptions {
        let device = if self.wgpu { Device::Wgpu } else { self.device.clone() };
        let (n_threads, exact, watch) = (self.threads, self.exact, interrupt::watch());
        EngineOptions { device, n_threads, exact, watch, ..Default::default() }
    }
}

/// The report: the JSON object of `--json`. Times are milliseconds, rates 10^9 operations per second.
#[derive(Serialize)]
struct EncoderReport {
    /// The version of the program.
    version: &'static str,
    /// The device that was measured.
    device: MeasuredDevice,
    /// The mmproj file, without its folder.
    mmproj: String,
    /// The picture.
    picture: MeasuredPicture,
    /// Rows that the encoder makes of it.
    n_rows: usize,
    /// Operations, in 10^9.
    operations: Operations,
    /// Reading and decoding the picture; `None` for the generated one.
    decode_ms: Option<f64>,
    /// Resizing, dividing and normalising it.
    prepare_ms: f64,
    /// Encoding it.
    encoder_ms: Milliseconds,
    /// The matrix products alone.
    products_ms: Milliseconds,
    /// All operations over the time of encoding.
    encoder_gflops: f64,
    /// The operations of products over their time.
    products_gflops: f64,
    /// `encoder_gflops / products_gflops`
    ratio: f64,
}

/// The device.
#[derive(Serialize)]
struct MeasuredDevice {
    /// `cpu`, `cuda` or `gpu`.
    kind: &'static str,
    /// The CPU's instruction set, or the GPU's name.
    name: String,
    /// Threads that compute; 1 for a GPU.
    threads: usize,
    /// The GPU's driver; `None` for a CPU.
    driver: Option<String>,
}

/// The picture.
#[derive(Serialize)]
struct MeasuredPicture {
    /// Pixels of a row.
    width: usize,
    /// Rows of pixels.
    height: usize,
    /// The sizes of what the encoder reads of it, `[width, height]`: the whole, or tiles.
    parts: Vec<[usize; 2]>,
}

/// Operations, in 10^9.
#[derive(Serialize)]
struct Operations {
    /// Of products with weights.
    products: f64,
    /// Of attention's products.
    attention: f64,
    /// Of convolutions of each column by itself.
    depthwise: f64,
}

/// Times of the runs.
#[derive(Serialize)]
struct Milliseconds {
    /// The median.
    median: f64,
    /// One for each run, in order.
    samples: Vec<f64>,
}

impl Milliseconds {
    /// The times of at least one run.
    fn new(times: &[Duration]) -> Self {
        let samples: Vec<f64> = times.iter().map(|&time| ms(time)).collect();
        let mut sorted = samples.clone();
        sorted.sort_by(f64::total_cmp);
        Self { median: f64::midpoint(sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]), samples }
    }
}

fn ms(time: Duration) -> f64 {
    1e3 * time.as_secs_f64()
}

/// A picture of gradients with noise, as photographs have.
fn generated() -> Result<Picture, Error> {
    let mut rgb = Vec::with_capacity(3 * SIDE * SIDE);
    let mut state = 1_u32;
    for i in 0..SIDE * SIDE {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let (x, y) = (i % SIDE * 192 / SIDE, i / SIDE * 192 / SIDE);
        rgb.extend([x, y, usize::midpoint(x, y)].map(|v| (v as u8).wrapping_add((state >> 26) as u8)));
    }
    Ok(Picture::new(SIDE, SIDE, rgb)?)
}

/// Runs the command.
pub fn run(args: &EncoderArgs) -> Result<(), CliError> {
    let in_file = |error: Error| CliError::InFile { file: args.mmproj.display().to_string(), error };
    let start = Instant::now();
    let (picture, decode_ms) = match &args.image {
        Some(path) => (read_picture(path)?, Some(ms(start.elapsed()))),
        None => (generated()?, None),
    };
    let file = map_gguf(&args.mmproj).map_err(|error| in_file(error.into()))?;
    let loading = ProgressLine::spinner("loading the picture encoder");
    loading.weigh(file.tensor_bytes());
    let mut bench = PictureEncoderBench::new(&file, &args.options()).map_err(in_file)?;
    drop(loading);
    let start = Instant::now();
    let prepared = bench.prepare(&picture)?;
    let prepare_ms = ms(start.elapsed());
    let _ctrl_c = interrupt::cancel_on_ctrl_c();
    let n_runs = args.warmup.saturating_add(args.iterations);
    let progress = ProgressLine::steps("measuring", n_runs as u64);
    let (mut encoder, mut products) = (Vec::new(), Vec::new());
    for run in 0..n_runs {
        let times = (bench.time(&prepared)?, bench.time_products(&prepared)?);
        if run >= args.warmup {
            encoder.push(times.0);
            products.push(times.1);
        }
        progress.set(run as u64 + 1);
    }
    drop(progress);
    let (encoder_ms, products_ms) = (Milliseconds::new(&encoder), Milliseconds::new(&products));
    let work = bench.work(&prepared);
    // 10^9 operations per second are 10^6 per millisecond.
    let encoder_gflops = work.flops() as f64 / encoder_ms.median / 1e6;
    let products_gflops = work.products as f64 / products_ms.median / 1e6;
    let DeviceInfo { kind, name, driver, n_threads } = bench.device();
    let report = EncoderReport {
        version: env!("CARGO_PKG_VERSION"),
        device: MeasuredDevice { kind, name, threads: n_threads, driver },
        mmproj: args.mmproj.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
        picture: MeasuredPicture { width: picture.width(), height: picture.height(), parts: prepared.sizes() },
        n_rows: work.n_rows,
        operations: Operations {
            products: work.products as f64 / 1e9,
            attention: work.attention as f64 / 1e9,
            depthwise: work.depthwise as f64 / 1e9,
        },
        decode_ms,
        prepare_ms,
        encoder_ms,
        products_ms,
        encoder_gflops,
        products_gflops,
        ratio: encoder_gflops / products_gflops,
    };
    let text = if args.json {
        let json = serde_json::to_string_pretty(&report);
        json.map_err(|e| CliError::General(format!("cannot write JSON: {e}")))? + "\n"
    } else {
        text(&report)
    };
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(CliError::stdout)
}

/// The report as lines.
fn text(report: &EncoderReport) -> String {
    let device = &report.device;
    let mut text = vec![format!("{}: {}, threads: {}", device.kind, device.name, device.threads)];
    text.extend(device.driver.as_ref().map(|driver| format!(", {driver}")));
    let MeasuredPicture { width, height, parts } = &report.picture;
    let (n_parts, n_rows) = (parts.len(), report.n_rows);
    text.push(format!("\n{}: {width} x {height} pixels, {n_rows} rows in {n_parts} part(s)\n\n", report.mmproj));
    let mut line = |what: &str, value: f64, unit: &str| text.push(format!("  {what:<28}  {value:>10.1} {unit}\n"));
    let operations = &report.operations;
    line("operations of products", operations.products, "GFLOP");
    line("  of attention", operations.attention, "GFLOP");
    if operations.depthwise > 0.0 {
        line("  of convolutions by column", operations.depthwise, "GFLOP");
    }
    if let Some(decode_ms) = report.decode_ms {
        line("reading the picture", decode_ms, "ms");
    }
    line("resizing and dividing it", report.prepare_ms, "ms");
    line("encoding it", report.encoder_ms.median, "ms");
    line("its products alone", report.products_ms.median, "ms");
    line("encoder", report.encoder_gflops, "GFLOP/s");
    line("products alone", report.products_gflops, "GFLOP/s");
    text.push(format!("  {:<28}  {:>10.2}\n", "ratio", report.ratio));
    text.concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_of_the_sorted_times() {
        let times = Milliseconds::new(&[3, 1, 2, 10].map(Duration::from_millis));
        assert_eq!((times.median, &times.samples[..]), (2.5, &[3.0, 1.0, 2.0, 10.0][..]));
    }

    #[test]
    fn the_generated_picture_has_gradients() {
        let picture = generated().unwrap();
        assert_eq!((picture.width(), picture.height()), (SIDE, SIDE));
        let mean = |rows: std::ops::Range<usize>| {
            rows.map(|y| picture.row(y).iter().map(|&v| u64::from(v)).sum::<u64>()).sum::<u64>()
        };
        assert!(mean(SIDE - 16..SIDE) > mean(0..16));
    }
}
