// SPDX-License-Identifier: Apache-2.0
//
// ckptfs._native: SnapshotWriter for Python.  Memory comes as addresses and sizes, so
// that nothing here depends on torch's ABI.  No lock is held while it runs but for the
// conversion of arguments.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>

#include "core/base/names.h"
#include "snapshot/device/cuda_copier.h"
#include "snapshot/trainer/replica_digest.h"
#include "snapshot/trainer/snapshot_writer.h"
#include "snapshot/wire/protocol.h"

namespace nb = nanobind;

namespace ckptfs {
namespace {

// Python lets go of it with its lock held, which the writer's thread may wait for.
class Writer : public SnapshotWriter {
 public:
  using SnapshotWriter::SnapshotWriter;
  ~Writer() {
    nb::gil_scoped_release unlock;
    Close();
  }
};

using Numbers = std::vector<uint64_t>;
// (shape, [(box begins, box ends, at)], local_shape, flat, order)
using PartTuple =
    std::tuple<Numbers, std::vector<std::tuple<Numbers, Numbers, Numbers>>, std::optional<Numbers>,
               std::optional<std::pair<uint64_t, uint64_t>>, Numbers>;
// (key, parameter, kind, optimizer, number, dtype, shape, address, device, lazy, part)
using TensorTuple = std::tuple<std::string, std::string, std::string, std::string, bool,
                               std::string, Numbers, uint64_t, int, bool, std::optional<PartTuple>>;
using GroupTuple = std::tuple<std::string, std::vector<std::string>, std::string>;
using DocumentTuple = std::tuple<std::string, std::string, std::string, std::vector<std::string>>;

// A plan that Python keeps from one save to the next.
struct Plan {
  std::shared_ptr<const CapturePlan> plan;
};

// A Python object that may be let go from any thread.
std::shared_ptr<PyObject> Shared(nb::object object) {
  return {object.release().ptr(), [](PyObject* held) {
            if (!Py_IsInitialized()) return;
            nb::gil_scoped_acquire lock;
            Py_XDECREF(held);
          }};
}

// The host's, after a Python function was called: tests hold copies up by it.
class CalledCopier final : public Copier {
 public:
  explicit CalledCopier(std::shared_ptr<PyObject> call) : call_(std::move(call)) {}
  Status Enqueue(std::span<const MemoryCopy> copies, Trainer trainer) override {
    {
      nb::gil_scoped_acquire lock;
      try {
        nb::borrow<nb::object>(call_.get())();
      } catch (const std::exception& error) {
        return Fail(ErrorCode::kInvalid, error.what());
      }
    }
    return host_.Enqueue(copies, trainer);
  }
  Status Wait() override { return host_.Wait(); }
  Result<PieceDigests> Digest(std::span<const MemoryPiece> pieces,
                              std::span<const DeviceStream> streams) override {
    return host_.Digest(pieces, streams);
  }
  Status Follow(std::span<const DeviceStream> streams) override { return host_.Follow(streams); }
  std::shared_ptr<const void> Pin(std::span<std::byte>) override { return nullptr; }

 private:
  std::shared_ptr<PyObject> call_;
  HostCopier host_;
};

std::chrono::milliseconds Milliseconds(double seconds) {
  const double bounded = std::isnan(seconds) ? 0 : std::clamp(seconds, 0.0, 1e9);
  return std::chrono::milliseconds(static_cast<int64_t>(bounded * 1000));
}

StatePart PartOf(const PartTuple& tuple) {
  const auto& [shape, pieces, local_shape, flat, order] = tuple;
  StatePart part{shape, {}, local_shape, {}, order};
  for (const auto& [begin, end, at] : pieces) part.pieces.push_back({begin, end, at});
  if (flat) part.flat = {flat->first, flat->second};
  return part;
}

CapturedTensor TensorOf(const TensorTuple& tuple) {
  const auto& [key, parameter, kind, optimizer, number, dtype, shape, address, device, lazy, part] =
      tuple;
  const auto known = DTypeFromTorch(dtype);
  if (!known) throw std::invalid_argument(key + ": dtype " + dtype + " is not known");
  CapturedTensor tensor;
  tensor.key = key;
  tensor.parameter = parameter;
  tensor.kind = kind;
  tensor.optimizer = optimizer;
  tensor.number = number;
  tensor.dtype = *known;
  tensor.shape = shape;
  if (part) tensor.part = PartOf(*part);
  tensor.from = reinterpret_cast<const std::byte*>(address);
  tensor.device = device;
  tensor.lazy = lazy;
  return tensor;
}

// Makes a plan of tensors without addresses.
Plan PlanOf(const std::vector<TensorTuple>& tuples) {
  std::vector<CapturedTensor> tensors;
  tensors.reserve(tuples.size());
  for (const TensorTuple& tuple : tuples) tensors.push_back(TensorOf(tuple));
  auto plan = CapturePlan::Make(std::move(tensors));
  if (!plan) throw std::invalid_argument(plan.error().message);
  return {std::make_shared<const CapturePlan>(*std::move(plan))};
}

// One parameter for each of Python's.
// NOLINTNEXTLINE(readability-function-size): nanobind takes a function as it is
Capture CaptureOf(uint64_t step, const std::string& framework, const std::string& framework_version,
                  const std::string& layout, const std::vector<TensorTuple>& tensors,
                  const Plan& plan, const Numbers& addresses,
                  const std::vector<std::pair<std::string, std::string>>& parameters,
                  const std::vector<std::pair<std::string, std::string>>& aliases,
                  const std::vector<GroupTuple>& groups,
                  const std::vector<DocumentTuple>& documents,
                  const std::vector<std::pair<int, uint64_t>>& streams,
                  const std::vector<std::pair<std::string, uint32_t>>& alike) {
  Capture capture;
  capture.step = step;
  capture.framework = framework;
  capture.framework_version = framework_version;
  capture.layout = layout;
  for (const TensorTuple& tuple : tensors) capture.tensors.push_back(TensorOf(tuple));
  capture.plan = plan.plan;
  for (const uint64_t address : addresses) {
    capture.sources.push_back(reinterpret_cast<const std::byte*>(address));
  }
  for (const auto& [name, role] : parameters) capture.parameters.push_back({name, role});
  capture.aliases = aliases;
  capture.alike = alike;
  for (const auto& [optimizer, names, pickle] : groups) {
    capture.groups.push_back({optimizer, names, pickle});
  }
  for (const auto& [key, scope, pickle, inner] : documents) {
    capture.documents.push_back({key, scope, pickle, inner});
  }
  for (const auto& [device, handle] : streams) capture.streams.push_back({device, handle});
  return capture;
}

// OWNERSHIP: what `given` held passes to the writer.
// `shot.raised` becomes what the handler of a signal raised.  It is set, not called: in a call more
// handlers could run.
bool Save(Writer& writer, Capture& given, nb::object owner, nb::object changed, nb::object shot,
          std::optional<double> limit) {
  Capture capture = std::move(given);
  capture.owner = Shared(std::move(owner));
  capture.changed = [call = Shared(std::move(changed))](bool all) -> std::string {
    nb::gil_scoped_acquire lock;
    try {
      return nb::cast<std::string>(nb::borrow<nb::object>(call.get())(all));
    } catch (const std::exception& error) {
      return std::string("a tensor that could not be looked at (") + error.what() + ")";
    }
  };
  capture.interrupted = [shot = Shared(std::move(shot))] {
    nb::gil_scoped_acquire lock;
    if (PyErr_CheckSignals() == 0) return false;
    const nb::python_error error;  // takes it
    nb::setattr(nb::handle(shot.get()), "raised", error.value());
    return true;
  };
  nb::gil_scoped_release unlock;
  return writer.Save(std::move(capture),
                     limit ? std::optional(Milliseconds(*limit)) : std::nullopt);
}

// As save, but what the handler of a signal raised is raised at once.
void Drop(Writer& writer, std::optional<uint64_t> step, const std::string& why) {
  std::optional<nb::python_error> raised;
  const auto interrupted = [&] {
    nb::gil_scoped_acquire lock;
    if (PyErr_CheckSignals() == 0) return false;
    raised.emplace();
    return true;
  };
  {
    nb::gil_scoped_release unlock;
    writer.Drop(step, why, interrupted);
  }
  if (raised) throw nb::python_error(std::move(*raised));
}

nb::dict SizeOf(const Writer& writer, const Capture& capture) {
  const auto size = writer.SizeOf(capture);
  if (!size) throw std::invalid_argument(size.error().message);
  nb::dict out;
  out["file_bytes"] = size->file_bytes;
  out["lazy_bytes"] = size->lazy_bytes;
  out["arena_bytes"] = size->arena_bytes;
  return out;
}

nb::dict ProgressOf(const Writer& writer, uint64_t step) {
  const WriterProgress progress = writer.Progress(step);
  nb::dict out;
  out["bytes"] = progress.bytes;
  out["copied"] = progress.copied;
  out["durable"] = progress.durable;
  return out;
}

std::string ReplicaDigest(const std::vector<std::pair<uint64_t, uint64_t>>& memory, uint64_t step) {
  nb::gil_scoped_release unlock;
  std::vector<std::span<const std::byte>> spans;
  for (const auto& [address, bytes] : memory) {
    spans.emplace_back(reinterpret_cast<const std::byte*>(address), bytes);
  }
  return ReplicaDigestOf(spans, step).Hex();
}

// Empty for the host's.
std::function<std::unique_ptr<Copier>()> CopierOf(const std::string& library) {
  if (library.empty()) return {};
  return CudaCopierMaker(library);
}

// Paths and what others say need not be UTF-8.
nb::object TextOf(const std::string& text) {
  return nb::steal(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

nb::dict StatusOf(const Writer& writer) {
  WriterStatus status;
  {
    nb::gil_scoped_release unlock;
    status = writer.status();
  }
  nb::dict out;
  out["connected"] = status.connected;
  out["saves"] = status.saves;
  out["durable"] = status.durable;
  out["dropped"] = status.dropped;
  out["under_way"] = status.under_way;
  out["full_drops"] = status.full_drops;
  out["full_waits"] = status.full_waits;
  out["last_durable"] = status.last_durable ? nb::cast(*status.last_durable) : nb::none();
  out["last_drop"] = TextOf(status.last_drop);
  out["file_bytes"] = status.file_bytes;
  out["unproved"] = status.unproved;
  out["unproved_bytes"] = status.unproved_bytes;
  out["save_seconds"] = status.save_seconds;
  out["wait_seconds"] = status.wait_seconds;
  return out;
}

NB_MODULE(_native, module) {
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  // A trainer may end with its engine alive: its user need not hear of it.
  nb::set_leak_warnings(false);
  module.def("has_cuda", [](const std::string& library) { return bool(CopierOf(library)); });
  module.def("not_received", [](const std::string& store) {
    const auto door = ConnectForSnapshots(store);
    return door ? std::string() : door.error().message;
  });
  (void)nb::class_<Capture>(module, "Capture");
  (void)nb::class_<Plan>(module, "Plan");
  module.def("plan", &PlanOf);
  module.def("replica_digest", &ReplicaDigest);
  module.def("capture", &CaptureOf);
  nb::class_<Writer>(module, "Writer")
      .def(
          "__init__",
          [](Writer* self, std::string store, std::string run, std::string job, uint32_t rank,
             uint32_t world, uint32_t slots, double update_limit, bool wait_for_room, uint64_t pace,
             const std::string& cuda_library, nb::object before_copy) {
            const Status named = CheckName(run, "run");
            if (!named) throw nb::value_error(named.error().message.c_str());
            WriterOptions options{std::move(store),
                                  std::move(run),
                                  std::move(job),
                                  rank,
                                  world,
                                  slots,
                                  Milliseconds(update_limit),
                                  CopierOf(cuda_library),
                                  wait_for_room,
                                  pace};
            if (!before_copy.is_none()) {
              options.make_copier = [call = Shared(std::move(before_copy))] {
                return std::make_unique<CalledCopier>(call);
              };
            }
            new (self) Writer(std::move(options));
          },
          nb::arg("store"), nb::arg("run"), nb::arg("job"), nb::arg("rank"), nb::arg("world"),
          nb::arg("slots"), nb::arg("update_limit"), nb::arg("wait_for_room"), nb::arg("pace"),
          nb::arg("cuda_library"), nb::arg("before_copy").none())
      .def("save", &Save, nb::arg("capture"), nb::arg("owner"), nb::arg("changed"), nb::arg("shot"),
           nb::arg("limit") = nb::none())
      .def("size", &SizeOf)
      .def("progress", &ProgressOf)
      .def("cancel", &SnapshotWriter::Cancel, Unlocked())
      .def("drop", &Drop, nb::arg("step").none(), nb::arg("why"))
      .def(
          "wait_before_update",
          [](Writer& self, double seconds, bool last) {
            return self.WaitBeforeUpdate(Milliseconds(seconds), last);
          },
          Unlocked())
      .def(
          "wait_durable",
          [](Writer& self, uint64_t step, double seconds) {
            return self.WaitDurable(step, Milliseconds(seconds));
          },
          Unlocked())
      .def("status", &StatusOf)
      .def("take_log",
           [](Writer& self) {
             nb::list lines;
             for (const std::string& line : self.TakeLog()) lines.append(TextOf(line));
             return lines;
           })
      .def("close", &SnapshotWriter::Close, Unlocked());
}

}  // namespace
}  // namespace ckptfs
