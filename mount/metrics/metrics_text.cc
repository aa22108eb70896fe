// SPDX-License-Identifier: Apache-2.0

#include "mount/metrics/metrics_text.h"

#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <set>
#include <sstream>

#include "core/base/printable.h"
#include "core/base/result.h"
#include "core/base/strings.h"
#include "fs/errno_map.h"
#include "mount/control/control_protocol.h"

namespace ckptfs {
namespace {

using nlohmann::json;
using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using MetricLabels = std::vector<ClientMetric::Label>;

constexpr double kNanosecond = 1e-9;

// The part of a status that a row makes samples of.
enum class Shape {
  kNumber,  // the number at `path`
  kKeys,    // the object at `path`: its keys are the values of the label
  kNames,   // the same, of names that others choose: at most kMostSeries
  kItems,   // the list at `path`: the labels are parts of its items, separated by commas
  kSaid,    // the same; 1 where the text at `value` is not empty
  kErrors,  // the object at `path`: its keys are names of error codes
  kSize,    // the number of elements at `path`
  kSum,     // {"count": n, "seconds": s} at `path`
  kUp,
  kInfo,  // 1, with the text at `path` as the label
};

struct MetricRow {
  const char* name;
  MetricType type;
  const char* path;  // a JSON pointer into the status
  const char* help;
  Shape shape = Shape::kNumber;
  const char* label = "";
  const char* value = "";  // a JSON pointer into the elements of an object or a list
  double unit = 1;
};

constexpr MetricType kCounter = MetricType::Counter;
constexpr MetricType kGauge = MetricType::Gauge;

constexpr MetricRow kMetricRows[] = {
    {"ckptfs_up", kGauge, "", "Whether the daemon answers (1) or is gone (0).", Shape::kUp},
    {"ckptfs_build_info", kGauge, "/process/version", "The daemon's version; its value is 1.",
     Shape::kInfo, "version"},
    {"ckptfs_process_start_time_seconds", kGauge, "/process/start_time_seconds",
     "When the daemon began, in seconds since 1970."},
    {"ckptfs_process_cpu_seconds_total", kCounter, "/process/cpu_seconds",
     "Processor time that the daemon used, user and system."},
    {"ckptfs_process_resident_memory_bytes", kGauge, "/process/resident_bytes",
     "Resident memory of the daemon, without filled files and arenas that nobody maps."},
    {"ckptfs_process_open_fds", kGauge, "/process/open_fds", "Open descriptors of the daemon."},
    {"ckptfs_process_max_fds", kGauge, "/process/max_fds", "The limit of its open descriptors."},

    {"ckptfs_requests_total", kCounter, "/requests", "Requests of the kernel, by kind.",
     Shape::kKeys, "request"},
    {"ckptfs_served_bytes_total", kCounter, "/served",
     "Bytes that passed through the daemon, by the way of serving; the kernel reads passed-through "
     "files by itself.",
     Shape::kKeys, "way"},
    {"ckptfs_source_read_bytes_total", kCounter, "/bytes_read",
     "Bytes that were read from source files."},
    {"ckptfs_opens_total", kCounter, "/opens", "Files opened, by the way of serving.", Shape::kKeys,
     "way"},
    {"ckptfs_opened_bytes_total", kCounter, "/opened_bytes",
     "Sizes of the files that were opened, by the way of serving.", Shape::kKeys, "way"},
    {"ckptfs_open_files", kGauge, "/open_files", "Files that are open now."},
    {"ckptfs_passthrough", kGauge, "/passthrough",
     "Whether the kernel reads materialised and direct files by itself (1)."},
    {"ckptfs_errors_total", kCounter, "/errors",
     "Requests that were refused or failed, by reason and by the errno that programs see; a name "
     "that does not exist is not counted.",
     Shape::kErrors, "reason"},

    {"ckptfs_materialise_hits_total", kCounter, "/materialised/hits",
     "Opens that found their file filled."},
    {"ckptfs_materialise_fills_total", kCounter, "/materialised/fills",
     "Opens that had to fill their file: the misses."},
    {"ckptfs_materialise_filled_bytes_total", kCounter, "/materialised/filled_bytes",
     "Bytes that were filled into memory."},
    {"ckptfs_materialise_evictions_total", kCounter, "/materialised/evictions",
     "Filled files that made room for others."},
    {"ckptfs_materialised_files", kGauge, "/materialised/files", "Files that are filled."},
    {"ckptfs_materialised_bytes", kGauge, "/materialised/bytes", "Memory that filled files take."},
    {"ckptfs_materialised_idle_bytes", kGauge, "/materialised/idle_bytes",
     "Memory that is kept ready for the next files."},
    {"ckptfs_materialised_budget_bytes", kGauge, "/materialised/budget",
     "Memory that filled files may take (--budget)."},
    {"ckptfs_listing_bytes", kGauge, "/listed_bytes", "Memory of listings."},
    {"ckptfs_loaded_steps", kGauge, "/loaded_steps", "Steps whose index is in memory."},
    {"ckptfs_loaded_bytes", kGauge, "/loaded_bytes", "Memory of these indexes."},
    {"ckptfs_view_bytes", kGauge, "/views/bytes", "Memory of views."},
    {"ckptfs_plan_bytes", kGauge, "/plans/bytes", "Memory of the plans of files."},

    {"ckptfs_runs", kGauge, "/runs", "Runs that the mount shows.", Shape::kSize},
    {"ckptfs_run_steps", kGauge, "/runs", "Steps of a run.", Shape::kNames, "run", "/steps"},
    {"ckptfs_run_latest_iteration", kGauge, "/runs", "The iteration of a run's latest step.",
     Shape::kNames, "run", "/iteration"},
    {"ckptfs_run_latest_saved_timestamp_seconds", kGauge, "/runs",
     "When the latest step of a run was saved, in seconds since 1970.", Shape::kNames, "run",
     "/saved_ns", kNanosecond},

    {"ckptfs_follow_adopted_steps_total", kCounter, "/following",
     "Steps that were adopted from a followed directory.", Shape::kItems, "path", "/adopted_total"},
    {"ckptfs_follow_withdrawn_steps_total", kCounter, "/following",
     "Adopted steps that were written again and withdrawn.", Shape::kItems, "path",
     "/withdrawn_total"},
    {"ckptfs_follow_waiting_steps", kGauge, "/following", "Steps that are not whole yet.",
     Shape::kItems, "path", "/waiting_steps"},
    {"ckptfs_follow_left_behind_steps", kGauge, "/following",
     "Steps that a save left behind unfinished.", Shape::kItems, "path", "/left_behind_steps"},
    {"ckptfs_follow_refused_steps", kGauge, "/following", "Whole steps that cannot be adopted.",
     Shape::kItems, "path", "/refused_steps"},
    {"ckptfs_follow_lag_seconds", kGauge, "/following",
     "From the last change of the files of the step that was adopted last to its adoption.",
     Shape::kItems, "path", "/lag_seconds"},
    {"ckptfs_follow_last_adopted_timestamp_seconds", kGauge, "/following",
     "When a step was adopted last, in seconds since 1970.", Shape::kItems, "path",
     "/last_adopted_ns", kNanosecond},
    {"ckptfs_follow_look_seconds_total", kCounter, "/following",
     "Time spent looking at the directory and adopting from it.", Shape::kItems, "path",
     "/look_seconds"},

    {"ckptfs_snapshot_ranks", kGauge, "/snapshots/ranks", "Ranks of jobs that are connected."},
    {"ckptfs_snapshot_arena_bytes", kGauge, "/snapshots/arena_bytes",
     "Memory of arenas that ranks have."},
    {"ckptfs_snapshot_arena_limit_bytes", kGauge, "/snapshots/arena_limit_bytes",
     "Memory that all arenas may take (--snapshot-memory)."},
    {"ckptfs_snapshot_arena_full_drops_total", kCounter, "/snapshots/full_drops",
     "Parts of saves that ranks dropped because their arena was full."},
    {"ckptfs_snapshot_arena_full_waits_total", kCounter, "/snapshots/full_waits",
     "Parts of saves that waited because their arena was full."},
    {"ckptfs_snapshot_incoming_saves", kGauge, "/snapshots/incoming",
     "Saves that wait for parts of ranks."},
    {"ckptfs_snapshot_waiting_saves", kGauge, "/snapshots/waiting",
     "Whole saves that wait for the store."},
    {"ckptfs_snapshot_oldest_waiting_seconds", kGauge, "/snapshots/oldest_waiting_seconds",
     "How long the oldest save that is not durable has waited; 0 if none waits."},
    {"ckptfs_snapshot_durable_saves_total", kCounter, "/snapshots/durable",
     "Saves that became durable."},
    {"ckptfs_snapshot_dropped_saves_total", kCounter, "/snapshots/dropped_for",
     "Saves that were dropped: never whole (incomplete), not a step or dropped elsewhere "
     "(refused), "
     "no room in the store (exhausted), the store failed for too long (failed).",
     Shape::kKeys, "reason"},
    {"ckptfs_snapshot_durable_lag_seconds", MetricType::Summary, "/snapshots/durable_lag",
     "From a save's first part to its being durable.", Shape::kSum},
    {"ckptfs_snapshot_last_durable_timestamp_seconds", kGauge, "/snapshots/last_durable_ns",
     "When a save became durable last, in seconds since 1970.", Shape::kNumber, "", "",
     kNanosecond},
    {"ckptfs_snapshot_memory_steps", kGauge, "/snapshots/in_memory",
     "Steps that are shown from memory and not durable.", Shape::kSize},
    {"ckptfs_retention_removed_steps_total", kCounter, "/snapshots/retention/removed",
     "Steps that the retention policy removed."},
    {"ckptfs_retention_reclaimed_bytes_total", kCounter, "/snapshots/retention/reclaimed_bytes",
     "Bytes of the store that were reclaimed."},
    {"ckptfs_retention_held_steps", kGauge, "/snapshots/retention/in_use",
     "Steps that would go, and are in use."},
    {"ckptfs_spool_bytes", kGauge, "/snapshots/spool/bytes", "Bytes in the spool."},
    {"ckptfs_spool_limit_bytes", kGauge, "/snapshots/spool/budget",
     "Bytes that the spool may take (--spool-size)."},
    {"ckptfs_spool_saves", kGauge, "/snapshots/spool/saves", "Saves in the spool."},
    {"ckptfs_spool_spooled_saves_total", kCounter, "/snapshots/spool/spooled",
     "Saves that were written to the spool."},
    {"ckptfs_spool_full_total", kCounter, "/snapshots/spool/full",
     "Saves for which the spool had no room."},
    {"ckptfs_spool_failures_total", kCounter, "/snapshots/spool/failed",
     "Saves that could not be written to the spool."},
    {"ckptfs_hot_steps", kGauge, "/snapshots/hot/steps",
     "Durable steps whose files are locked in "
     "memory (--hot-steps)."},
    {"ckptfs_hot_bytes", kGauge, "/snapshots/hot/bytes", "Memory of these steps."},

    {"ckptfs_peer_memory_limit_bytes", kGauge, "/snapshots/peers/memory",
     "Memory for parts of steps, others' and own (--peer-memory)."},
    {"ckptfs_peer_memory_bytes", kGauge, "/snapshots/peers/used", "Memory that these parts take."},
    {"ckptfs_peer_links", kGauge, "/snapshots/peers/links", "Links from other daemons."},
    {"ckptfs_peer_received_bytes_total", kCounter, "/snapshots/peers/received_bytes",
     "Bytes received from peers."},
    {"ckptfs_peer_sent_bytes_total", kCounter, "/snapshots/peers/peers", "Bytes sent to a peer.",
     Shape::kItems, "host,address", "/sent_bytes"},
    {"ckptfs_peer_away", kGauge, "/snapshots/peers/peers", "Whether a peer does not answer (1).",
     Shape::kSaid, "host,address", "/away"},
    {"ckptfs_peer_protected_saves_total", kCounter, "/snapshots/peers/protect/protected",
     "Saves that other daemons hold, too (--protect)."},
    {"ckptfs_peer_unprotected_saves_total", kCounter, "/snapshots/peers/protect/passed_over",
     "Saves that became durable, or were dropped, before others held them."},
    {"ckptfs_peer_full_total", kCounter, "/snapshots/peers/protect/full",
     "Times that peers had no memory for a save."},
};

std::optional<double> MetricNumber(const json& value) {
  if (value.is_boolean()) return value.get<bool>() ? 1 : 0;
  if (value.is_number()) return value.get<double>();
  return std::nullopt;
}

// The part of a status at a pointer, null if it is not there.
const json& PartAt(const json& status, const char* pointer) {
  static const json none;
  const json::json_pointer at{std::string(pointer)};
  return status.contains(at) ? status.at(at) : none;
}

std::string ErrnoText(std::string_view code) {
  const char* const name = ::strerrorname_np(ErrnoOf(ErrorCodeNamed(code)));
  return name == nullptr ? "" : name;
}

// The samples of one metric; a series is told once, whatever a status repeats.
class FamilyWriter {
 public:
  explicit FamilyWriter(const MetricRow& row) : row_(row) {
    family_.name = row.name;
    family_.help = row.help;
    family_.type = row.type;
  }

  void Tell(const MetricsSource& source) {
    from_ = {{"store", Printable(source.store)}, {"mountpoint", Printable(source.mountpoint)}};
    if (row_.shape == Shape::kUp) return Add({}, source.up ? 1 : 0);
    const json& part = PartAt(source.status, row_.path);
    switch (row_.shape) {
      case Shape::kUp: return;
      case Shape::kNumber: return AddNumber({}, part);
      case Shape::kKeys:
      case Shape::kNames:
      case Shape::kErrors: return AddKeys(part);
      case Shape::kItems:
      case Shape::kSaid: return AddItems(part);
      case Shape::kSize:
        if (part.is_structured()) Add({}, static_cast<double>(part.size()));
        return;
      case Shape::kSum: return AddSum(part);
      case Shape::kInfo:
        if (part.is_string()) Add({{row_.label, Printable(part.get<std::string>())}}, 1);
        return;
    }
  }

  MetricFamily Take() { return std::move(family_); }

 private:
  // The rest of the sample's labels come first: those of its source are the same in all of them.
  ClientMetric* NewSample(MetricLabels labels) {
    labels.insert(labels.end(), from_.begin(), from_.end());
    if (!told_.insert(labels).second) return nullptr;
    ClientMetric sample;
    sample.label = std::move(labels);
    return &family_.metric.emplace_back(std::move(sample));
  }

  void Add(MetricLabels labels, double value) {
    ClientMetric* const sample = NewSample(std::move(labels));
    if (sample == nullptr) return;
    (row_.type == kCounter ? sample->counter.value : sample->gauge.value) = value * row_.unit;
  }

  void AddNumber(MetricLabels labels, const json& value) {
    if (const auto number = MetricNumber(value)) Add(std::move(labels), *number);
  }

  void AddKeys(const json& object) {
    if (!object.is_object()) return;
    size_t count = 0;
    for (const auto& [key, value] : object.items()) {
      if (row_.shape == Shape::kNames && ++count > kMostSeries) return;
      MetricLabels labels = {{row_.label, Printable(key)}};
      if (row_.shape == Shape::kErrors) labels.push_back({"errno", ErrnoText(key)});
      AddNumber(std::move(labels), *row_.value == 0 ? value : PartAt(value, row_.value));
    }
  }

  void AddItems(const json& list) {
    if (!list.is_array()) return;
    for (size_t i = 0; i < list.size() && i < kMostSeries; ++i) {
      MetricLabels labels;
      std::istringstream names(row_.label);
      for (std::string name; std::getline(names, name, ',');) {
        const json& text = PartAt(list[i], StrCat("/", name).c_str());
        labels.push_back({name, text.is_string() ? Printable(text.get<std::string>()) : ""});
      }
      const json& value = PartAt(list[i], row_.value);
      if (row_.shape == Shape::kItems) AddNumber(std::move(labels), value);
      if (row_.shape == Shape::kSaid && value.is_string()) {
        Add(std::move(labels), value.get_ref<const std::string&>().empty() ? 0 : 1);
      }
    }
  }

  void AddSum(const json& part) {
    const auto count = MetricNumber(PartAt(part, "/count"));
    const auto seconds = MetricNumber(PartAt(part, "/seconds"));
    ClientMetric* const sample = count && seconds ? NewSample({}) : nullptr;
    if (sample == nullptr) return;
    sample->summary.sample_count = static_cast<uint64_t>(*count);
    sample->summary.sample_sum = *seconds;
  }

  const MetricRow& row_;
  MetricFamily family_;
  MetricLabels from_;  // the labels of the source
  std::set<MetricLabels> told_;
};

}  // namespace

std::string MetricsText(std::span<const MetricsSource> sources) {
  std::vector<MetricFamily> families;
  for (const MetricRow& row : kMetricRows) {
    FamilyWriter writer(row);
    for (const MetricsSource& source : sources) writer.Tell(source);
    MetricFamily family = writer.Take();
    if (!family.metric.empty()) families.push_back(std::move(family));
  }
  return prometheus::TextSerializer().Serialize(families);
}

std::vector<MetricInfo> AllMetrics() {
  std::vector<MetricInfo> all;
  for (const MetricRow& row : kMetricRows) {
    const char* const type = row.type == kCounter ? "counter"
                             : row.type == kGauge ? "gauge"
                                                  : "summary";
    all.push_back({row.name, type, row.help});
  }
  return all;
}

}  // namespace ckptfs
