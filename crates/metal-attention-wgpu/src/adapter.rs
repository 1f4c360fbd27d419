//! The GPUs of this machine (adapters, in wgpu's words): listing them and choosing one.

use crate::error::{WgpuError, mib};

/// Which GPU to open.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum AdapterChoice {
    /// The first one in the order of [`adapter_summaries`], in which hardware precedes software.
    #[default]
    Best,
    /// The first hardware one with enough memory for this many bytes, a tenth of its memory kept free.
    Hardware {
        /// Bytes that the model will take.
        bytes: u64,
    },
    /// The one with this index in the order of [`adapter_summaries`].
    Index(usize),
    /// The first one whose name contains this, in upper or lower case.
    Name(String),
}

/// The properties of a GPU, as its driver reports them.
#[derive(Debug, Clone)]
pub struct AdapterSummary {
    /// Its name.
    pub name: String,
    /// `"vulkan"`, `"metal"` or `"dx12"`.
    pub backend: &'static str,
    /// Its kind: discrete, integrated, virtual, software, other.
    pub kind: wgpu::DeviceType,
    /// Driver name and version.
    pub driver: String,
    /// Bytes of its own memory, if the driver reports them.
    pub memory: Option<u64>,
    /// Lanes of its smallest and largest subgroup.
    pub subgroup_sizes: (u32, u32),
    /// Its optional features.
    pub features: wgpu::Features,
    /// Bytes of the largest buffer that one binding of a shader can be, at most what 32-bit indices reach.
    pub max_binding: u64,
    /// Shapes of the matrix products that its matrix units support.
    pub cooperative_matrices: Vec<wgpu::CooperativeMatrixProperties>,
    /// wgpu's own description.
    pub(crate) info: wgpu::AdapterInfo,
}

impl AdapterSummary {
    /// The vendor's id, as on the PCI bus.
    pub fn vendor(&self) -> u32 {
        self.info.vendor
    }

    fn new(adapter: &wgpu::Adapter) -> Self {
        let info = adapter.get_info();
        Self {
            name: info.name.clone(),
            backend: info.backend.to_str(),
            kind: info.device_type,
            driver: format!("{} {}", info.driver, info.driver_info).trim().to_owned(),
            memory: memory(adapter),
            subgroup_sizes: (info.subgroup_min_size, info.subgroup_max_size),
            features: adapter.features(),
            max_binding: max_binding(&adapter.limits()),
            cooperative_matrices: adapter.cooperative_matrix_properties(),
            info,
        }
    }

    /// Whether it is a software GPU: the CPU runs the shaders.
    pub fn is_software(&self) -> bool {
        self.kind == wgpu::DeviceType::Cpu
    }

    /// The reason why it does not suit a model of `bytes`: it is a software GPU, or with a tenth kept free its memory
    /// is too small. `None`: it suits.
    fn why_not(&self, bytes: u64) -> Option<String> {
        match self.memory {
            _ if self.is_software() => Some(format!("{} is software", self.name)),
            Some(memory) if bytes > memory - memory / 10 => {
                Some(format!("{} has {:.1} MiB and {:.1} MiB are needed", self.name, mib(memory), mib(bytes)))
            }
            _ => None,
        }
    }
}

/// The largest binding, in whole vectors of four words.
fn max_binding(limits: &wgpu::Limits) -> u64 {
    limits.max_buffer_size.min(limits.max_storage_buffer_binding_size).min(u64::from(u32::MAX)) & !15
}

/// Bytes of the largest memory heap on the device, if the backend reports it.
fn memory(adapter: &wgpu::Adapter) -> Option<u64> {
    #[cfg(any(target_os = "linux", target_os = "windows", target_os = "android"))]
    {
        // SAFETY: the handles are only read from, while `adapter` keeps them alive.
        let adapter = unsafe { adapter.as_hal::<wgpu::hal::api::Vulkan>() }?;
        let instance = adapter.shared_instance().raw_instance();
        // SAFETY: the physical device belongs to this instance.
        let heaps = unsafe { instance.get_physical_device_memory_properties(adapter.raw_physical_device()) };
        let heaps = &heaps.memory_heaps[..heaps.memory_heap_count as usize];
        // Bit 0 is VK_MEMORY_HEAP_DEVICE_LOCAL_BIT.
        heaps.iter().filter(|heap| heap.flags.as_raw() & 1 != 0).map(|heap| heap.size).max()
    }
    #[cfg(not(any(target_os = "linux", target_os = "windows", target_os = "android")))]
    {
        let _ = adapter;
        None
    }
}

/// All adapters: discrete GPUs first, then integrated, virtual and others, software last.
pub(crate) fn adapters() -> Vec<(wgpu::Adapter, AdapterSummary)> {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = wgpu::Backends::VULKAN | wgpu::Backends::METAL | wgpu::Backends::DX12;
    descriptor.flags = wgpu::InstanceFlags::empty().with_env();
    let instance = wgpu::Instance::new(descriptor);
    let mut found: Vec<_> = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::all()))
        .into_iter()
        .map(|adapter| {
            let summary = AdapterSummary::new(&adapter);
            (adapter, summary)
        })
        .collect();
    found.sort_by_key(|(_, summary)| match summary.kind {
        wgpu::DeviceType::DiscreteGpu => 0,
        wgpu::DeviceType::IntegratedGpu => 1,
        wgpu::DeviceType::VirtualGpu => 2,
        wgpu::DeviceType::Other => 3,
        wgpu::DeviceType::Cpu => 4,
    });
    found
}

/// The properties of all GPUs of this machine, in the order of their indices.
pub fn adapter_summaries() -> Vec<AdapterSummary> {
    adapters().into_iter().map(|(_, summary)| summary).collect()
}

/// Whether this machine may have a hardware GPU, by its device files. This takes microseconds; loading every driver
/// takes tens of milliseconds.
fn hardware_possible() -> bool {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    {
        use std::path::Path;
        // NVIDIA's drivers, the Windows host of WSL, Arm's and Qualcomm's drivers for Android.
        let nodes = ["/dev/nvidiactl", "/dev/nvgpu", "/dev/nvhost-ctrl-gpu", "/dev/dxg", "/dev/mali0", "/dev/kgsl-3d0"];
        // Render nodes, which every driver of the Linux kernel makes.
        let render_node = |entry: std::io::Result<std::fs::DirEntry>| {
            entry.is_ok_and(|entry| entry.file_name().to_string_lossy().starts_with("renderD"))
        };
        nodes.iter().any(|node| Path::new(node).exists())
            || std::fs::read_dir("/dev/dri").is_ok_and(|mut entries| entries.any(render_node))
    }
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    {
        true
    }
}

/// The error for a hardware GPU, if there can be none: found without loading any driver.
pub fn no_hardware() -> Option<WgpuError> {
    let none = || WgpuError::NoneSuits { why: vec!["this machine has none that is no software".into()] };
    (!hardware_possible()).then(none)
}

impl AdapterChoice {
    /// The index of the chosen adapter among `found`.
    pub fn choose(&self, found: &[AdapterSummary]) -> Result<usize, WgpuError> {
        if found.is_empty() {
            return Err(WgpuError::NoAdapter);
        }
        let (at, wanted) = match self {
            Self::Best => (Some(0), String::new()),
            Self::Hardware { bytes } => {
                let why_not: Vec<_> = found.iter().map(|s| s.why_not(*bytes)).collect();
                let at = why_not.iter().position(Option::is_none);
                return at.ok_or_else(|| WgpuError::NoneSuits { why: why_not.into_iter().flatten().collect() });
            }
            Self::Index(i) => (Some(*i).filter(|&i| i < found.len()), i.to_string()),
            Self::Name(name) => {
                let lower = name.to_lowercase();
                (found.iter().position(|s| s.name.to_lowercase().contains(&lower)), name.clone())
            }
        };
        at.ok_or_else(|| WgpuError::NoMatch {
            wanted,
            available: found.iter().enumerate().map(|(i, s)| format!("{i}: {}", s.name)).collect(),
        })
    }

    /// The chosen adapter.
    pub(crate) fn pick(
        &self,
        found: Vec<(wgpu::Adapter, AdapterSummary)>,
    ) -> Result<(wgpu::Adapter, AdapterSummary), WgpuError> {
        let (mut adapters, mut summaries): (Vec<_>, Vec<_>) = found.into_iter().unzip();
        let at = self.choose(&summaries)?;
        Ok((adapters.swap_remove(at), summaries.swap_remove(at)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(name: &str, kind: wgpu::DeviceType, memory: Option<u64>) -> AdapterSummary {
        let info = wgpu::AdapterInfo::new(kind, wgpu::Backend::Vulkan);
        AdapterSummary {
            name: name.into(),
            backend: "vulkan",
            kind,
            driver: String::new(),
            memory,
            subgroup_sizes: (32, 32),
            features: wgpu::Features::empty(),
            max_binding: 1 << 30,
            cooperative_matrices: Vec::new(),
            info,
        }
    }

    #[test]
    fn every_choice_is_an_index_or_an_error() {
        let (gpu, cpu) = (wgpu::DeviceType::DiscreteGpu, wgpu::DeviceType::Cpu);
        let found = [
            summary("Small One", gpu, Some(1000)),
            summary("Large One", gpu, Some(2000)),
            summary("lavapipe", cpu, None),
        ];
        let name = |name: &str| AdapterChoice::Name(name.into());
        for (choice, at) in [
            (AdapterChoice::Best, 0),
            (AdapterChoice::Index(2), 2),
            (name("one"), 0),
            (name("LARGE"), 1),
            (AdapterChoice::Hardware { bytes: 0 }, 0),
            (AdapterChoice::Hardware { bytes: 900 }, 0),
            (AdapterChoice::Hardware { bytes: 901 }, 1),
        ] {
            assert_eq!(choice.choose(&found).unwrap(), at, "{choice:?}");
        }
        for (choice, sentence) in [
            (AdapterChoice::Index(3), r#"no GPU matches "3"; there are: 0: Small One; 1: Large One; 2: lavapipe"#),
            (name("x"), r#"no GPU matches "x"; there are: 0: Small One; 1: Large One; 2: lavapipe"#),
            (
                AdapterChoice::Hardware { bytes: 3 << 20 },
                "no GPU suits: Small One has 0.0 MiB and 3.0 MiB are needed; Large One has 0.0 MiB and 3.0 MiB are \
                 needed; lavapipe is software",
            ),
        ] {
            assert_eq!(choice.choose(&found).unwrap_err().to_string(), sentence);
        }
        assert!(matches!(AdapterChoice::Best.choose(&[]), Err(WgpuError::NoAdapter)));
        assert_eq!(AdapterChoice::Hardware { bytes: u64::MAX }.choose(&[summary("x", gpu, None)]).unwrap(), 0);
    }
}
