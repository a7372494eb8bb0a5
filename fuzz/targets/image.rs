//! Targets of imp-image. `IMP_FUZZ_TARGET` names the one to run (see `imp_image::fuzzing::TARGETS`): one program for all of them is
//! built and linked once.
#![no_main]

use imp_image::fuzzing::TARGETS;
use std::sync::OnceLock;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    static TARGET: OnceLock<fn(&[u8])> = OnceLock::new();
    let target = TARGET.get_or_init(|| {
        let name = std::env::var("IMP_FUZZ_TARGET").unwrap_or_default();
        let found = TARGETS.iter().find(|(known, _)| *known == name);
        found.unwrap_or_else(|| panic!("IMP_FUZZ_TARGET={name:?} names no target")).1
    });
    target(bytes);
});
