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
using Pairs = std::vector<std::pair<std::string, std::string>>;

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
  Result<DeviceMoment> TakeMoment(std::span<const MemoryPiece> digested,
                                  std::span<const MemoryPiece> taken,
                                  std::span<const DeviceStream> streams) override {
    return host_.TakeMoment(digested, taken, streams);
  }
  Result<std::shared_ptr<const CopyMark>> Mark(std::span<const DeviceStream> streams) override {
    return host_.Mark(streams);
  }
  Status Follow(std::span<const DeviceStream> streams) override { return host_.Follow(streams); }
  Result<std::shared_ptr<const void>> Pin(std::span<std::byte> memory, int device) override {
    return host_.Pin(memory, device);
  }

 private:
  std::shared_ptr<PyObject> call_;
  HostCopier host_;
};

std::chrono::milliseconds Milliseconds(double seconds) {
  const double bounded = std::isnan(seconds) ? 0 : std::clamp(seconds, 0.0, 1e9);
  return std::chrono::milliseconds(static_cast<int64_t>(bounded * 1000));
}

void MakePart(StatePart* self, Numbers shape,
              const std::vector<std::tuple<Numbers, Numbers, Numbers>>& pieces,
              std::optional<Numbers> local_shape, std::optional<std::pair<uint64_t, uint64_t>> flat,
              Numbers order) {
  auto* const part =
      new (self) StatePart{std::move(shape), {}, std::move(local_shape), {}, std::move(order)};
  for (const auto& [begin, end, at] : pieces) part->pieces.push_back({begin, end, at});
  if (flat) part->flat = {flat->first, flat->second};
}

DType DTypeNamed(const std::string& key, const std::string& name) {
  const auto known = DTypeFromTorch(name);
  if (!known) throw std::invalid_argument(key + ": dtype " + name + " is not known");
  return *known;
}

const std::byte* At(uint64_t address) { return reinterpret_cast<const std::byte*>(address); }

// Makes a plan of tensors without addresses.
Plan PlanOf(std::vector<CapturedTensor> tensors) {
  auto plan = CapturePlan::Make(std::move(tensors));
  if (!plan) throw std::invalid_argument(plan.error().message);
  return {std::make_shared<const CapturePlan>(*std::move(plan))};
}

// Binds the parts of a capture, as Python names them.
void BindCapture(nb::module_& module) {
  nb::class_<StatePart>(module, "Part")
      .def("__init__", &MakePart, nb::kw_only(), nb::arg("shape"), nb::arg("pieces"),
           nb::arg("local_shape").none(), nb::arg("flat").none(), nb::arg("order"));
  nb::class_<CapturedTensor>(module, "Tensor")
      .def(
          "__init__",
          [](CapturedTensor* self, std::string key, std::string parameter, std::string kind,
             std::string optimizer, bool number, const std::string& dtype, Numbers shape,
             std::optional<StatePart> part, uint64_t address, int device, bool lazy) {
            const DType known = DTypeNamed(key, dtype);
            new (self) CapturedTensor{std::move(key),
                                      std::move(parameter),
                                      std::move(kind),
                                      std::move(optimizer),
                                      number,
                                      known,
                                      std::move(shape),
                                      std::move(part),
                                      At(address),
                                      device,
                                      lazy};
          },
          nb::kw_only(), nb::arg("key"), nb::arg("parameter"), nb::arg("kind"),
          nb::arg("optimizer"), nb::arg("number"), nb::arg("dtype"), nb::arg("shape"),
          nb::arg("part").none(), nb::arg("address"), nb::arg("device"), nb::arg("lazy"));
  nb::class_<Plan>(module, "Plan").def("__init__", [](Plan* self, std::vector<CapturedTensor> of) {
    new (self) Plan(PlanOf(std::move(of)));
  });
  nb::class_<Capture>(module, "Capture")
      .def(nb::init<>())
      .def_rw("step", &Capture::step)
      .def_rw("framework", &Capture::framework)
      .def_rw("framework_version", &Capture::framework_version)
      .def_rw("layout", &Capture::layout)
      .def_rw("aliases", &Capture::aliases)
      .def_rw("alike", &Capture::alike)
      .def("add_tensors",
           [](Capture& self, const std::vector<CapturedTensor>& tensors) {
             self.tensors.insert(self.tensors.end(), tensors.begin(), tensors.end());
           })
      .def("add_planned",
           [](Capture& self, const Plan& plan, const Numbers& addresses) {
             self.plan = plan.plan;
             for (const uint64_t address : addresses) self.sources.push_back(At(address));
           })
      .def("add_parameters",
           [](Capture& self, const Pairs& names_and_roles) {
             for (const auto& [name, role] : names_and_roles) {
               self.parameters.push_back({name, role});
             }
           })
      .def("add_group",
           [](Capture& self, std::string optimizer, std::vector<std::string> names,
              std::string pickle) {
             self.groups.push_back({std::move(optimizer), std::move(names), std::move(pickle)});
           })
      .def("add_document",
           [](Capture& self, std::string key, std::string scope, std::string pickle,
              std::vector<std::string> tensors) {
             self.documents.push_back(
                 {std::move(key), std::move(scope), std::move(pickle), std::move(tensors)});
           })
      .def("add_stream", [](Capture& self, int device, uint64_t handle) {
        self.streams.push_back({device, handle});
      });
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
    spans.emplace_back(At(address), bytes);
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
  out["arena_bytes"] = status.arena_bytes;
  out["pinned_bytes"] = status.pinned_bytes;
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
  BindCapture(module);
  module.def("replica_digest", &ReplicaDigest);
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
      .def("expect", &SnapshotWriter::Expect, Unlocked())
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
      .def("hold_update",
           [](Writer& self, const std::vector<std::pair<int, uint64_t>>& streams) {
             nb::gil_scoped_release unlock;
             std::vector<DeviceStream> given;
             for (const auto& [device, handle] : streams) given.push_back({device, handle});
             return self.HoldUpdate(given);
           })
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
