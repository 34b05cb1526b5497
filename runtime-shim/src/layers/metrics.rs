//! What the layer store counts, read when it is asked for.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use sandman_layer_store::origin::{Counters, Fault};

use super::Layers;

/// The store's metrics.
#[derive(Debug)]
pub(crate) struct LayerMetrics {
    layers: Arc<Layers>,
    registries: Arc<Counters>,
}

impl LayerMetrics {
    /// `registries` counts what readers needed of them.
    pub(crate) fn new(layers: Arc<Layers>, registries: Arc<Counters>) -> Self {
        Self { layers, registries }
    }
}

impl Collector for LayerMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let filler = self.layers.store().filler().counters();
        for (name, help, value) in [
            (
                "layer_first_sight_bytes",
                "Bytes of layers that this host saw for the first time and fetched whole",
                self.layers.first_sight_bytes(),
            ),
            (
                "layer_origin_bytes",
                "Bytes that registries sent because somebody read them",
                self.registries.bytes(),
            ),
            (
                "layer_origin_requests",
                "Requests to registries for parts of layers",
                self.registries.requests(),
            ),
            (
                "layer_reads",
                "Reads of incomplete layers that the kernel asked about",
                filler.questions(),
            ),
            (
                "layer_reads_hit",
                "Those of them whose bytes were there already",
                filler.filled_at_once(),
            ),
            (
                "layer_reads_failed",
                "Those of them that ended with an error",
                filler.failed(),
            ),
            (
                "layer_spans",
                "Spans of layers that were fetched, verified and written",
                filler.spans(),
            ),
        ] {
            let counter = ConstCounter::new(value);
            let metric = encoder.encode_descriptor(name, help, None, counter.metric_type())?;
            counter.encode(metric)?;
        }
        let mut faults = encoder.encode_descriptor(
            "layer_origin_faults",
            "Failed requests to registries for parts of layers, by cause",
            None,
            MetricType::Counter,
        )?;
        for fault in Fault::ALL {
            let labels = [("cause", fault.name())];
            let metric = faults.encode_family(&labels)?;
            ConstCounter::new(self.registries.faults(fault)).encode(metric)?;
        }
        let mut member = encoder.encode_descriptor(
            "layer_member",
            "How this host gets at the bytes of layers",
            None,
            MetricType::Gauge,
        )?;
        let labels = [("member", self.layers.member().name())];
        ConstGauge::new(1_i64).encode(member.encode_family(&labels)?)?;
        self.encode_cache(&mut encoder)
    }
}

impl LayerMetrics {
    fn encode_cache(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        // A folder that cannot be listed has no size; the rest is worth having.
        let Ok(entries) = self.layers.store().cache().list() else {
            return Ok(());
        };
        let bytes: u64 = entries.iter().map(|entry| entry.bytes).sum();
        for (name, help, value) in [
            ("layer_cache_bytes", "Bytes on disk that layers take", bytes),
            (
                "layer_cache_max_bytes",
                "Bytes above which unused layers go",
                self.layers.max_bytes(),
            ),
        ] {
            let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            let metric = encoder.encode_descriptor(name, help, None, gauge.metric_type())?;
            gauge.encode(metric)?;
        }
        let mut layers = encoder.encode_descriptor(
            "layer_cache_layers",
            "Layers on disk, by how much of them is there",
            None,
            MetricType::Gauge,
        )?;
        for (state, count) in [
            (
                "complete",
                entries.iter().filter(|entry| entry.sealed).count(),
            ),
            (
                "partial",
                entries.iter().filter(|entry| !entry.sealed).count(),
            ),
        ] {
            let labels = [("state", state)];
            let gauge = ConstGauge::new(i64::try_from(count).unwrap_or(i64::MAX));
            gauge.encode(layers.encode_family(&labels)?)?;
        }
        Ok(())
    }
}
