//! What happens when workgroups that should run side by side do not.

use std::path::Path;

use metal_attention_gguf::GgufFile;
use metal_attention_kernels::GpuOptions;

use super::*;

fn start(gpu: &Arc<GpuDevice>, groups: usize) -> GpuForwardPass {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/reference/architectures");
    let file = GgufFile::open(models.join("llama-mha.gguf")).unwrap();
    let spec = ModelSpec::from_metadata(file.metadata()).unwrap();
    let weights = Weights::load(&file, &spec).unwrap();
    let options = GpuForwardPassOptions { n_ctx: 32, layers_at_once: Some(groups), ..Default::default() };
    GpuForwardPass::new(Arc::clone(gpu), spec, &weights, &options).unwrap()
}

#[test]
fn a_step_that_was_given_up_is_taken_again() {
    let gpu = match GpuDevice::open(&GpuOptions { checked: true, ..Default::default() }) {
        Ok(gpu) => Arc::new(gpu),
        Err(GpuError::NoAdapter) if std::env::var_os("CI").is_none() => return,
        Err(e) => panic!("{e}"),
    };
    let mut one_by_one = start(&gpu, 0);
    let token = |pos| BatchToken { id: 5 + pos as u32, seq: 0, pos, logits: true };
    let want: Vec<_> = (0..4).map(|pos| one_by_one.forward_greedy(&[token(pos)]).unwrap()).collect();
    for greedy in [false, true] {
        let mut at_once = start(&gpu, 1);
        for (pos, want) in want.iter().enumerate() {
            if pos == 2 {
                gpu.write(at_once.at_once.as_ref().unwrap(), &[0u32, 1]);
            }
            let got = if greedy {
                at_once.forward_greedy(&[token(pos)]).unwrap()
            } else {
                let top = at_once.forward_top_k(&[token(pos)], 1).unwrap();
                top.iter().map(|list| list[0].0).collect()
            };
            assert_eq!(got, *want, "position {pos}");
            assert_eq!(at_once.at_once.is_none(), pos >= 2);
        }
    }
}

#[test]
fn more_workgroups_than_run_side_by_side_are_not_used() {
    let Ok(gpu) = GpuDevice::open(&GpuOptions { checked: true, ..Default::default() }) else { return };
    if gpu.summary().kind == metal_attention_kernels::wgpu::DeviceType::Cpu {
        let groups = 4 * std::thread::available_parallelism().map_or(1, usize::from);
        assert!(start(&Arc::new(gpu), groups).at_once.is_none());
    }
}
