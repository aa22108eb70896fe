// SPDX-License-Identifier: Apache-2.0

#include "core/state/assembler.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/blob/fingerprint.h"
#include "core/state/coverage.h"

namespace ckptfs {
namespace {

constexpr size_t kDefectsShown = 3;

// Python's texts may hold half a character (a lone surrogate), which files that are JSON
// inside, as safetensors' headers, cannot have in a name.
Status CheckName(std::string_view name) {
  if (name.empty()) return Fail(ErrorCode::kUnsupported, "a tensor without a name");
  for (size_t at = name.find('\xed'); at != name.npos; at = name.find('\xed', at + 1)) {
    if (at + 1 == name.size() || static_cast<unsigned char>(name[at + 1]) < 0xa0) continue;
    return Fail(ErrorCode::kUnsupported,
                StrCat("the name '", name, "' holds a lone surrogate, which is not UTF-8"));
  }
  return {};
}

// A file's name, all links resolved, stays below its directory.
Status CheckInside(const std::string& directory, std::string_view path) {
  const std::string name = JoinPath(directory, path);
  const std::unique_ptr<char, void (*)(void*)> real(::realpath(name.c_str(), nullptr), std::free);
  if (!real) return Fail(ErrnoError(errno, name));
  const std::unique_ptr<char, void (*)(void*)> base(::realpath(directory.c_str(), nullptr),
                                                    std::free);
  if (!base) return Fail(ErrnoError(errno, directory));
  if (std::string_view(real.get()).starts_with(JoinPath(base.get(), "") + "/")) return {};
  if (std::string_view(base.get()) == "/") return {};
  return Fail(ErrorCode::kInvalid, StrCat(name,
                                          ": a symbolic link that leaves the checkpoint's "
                                          "directory ",
                                          directory));
}

// `directory`: the file's, below which its path is `path`.
Result<Blob> Inspect(uint32_t root_index, const std::string& directory, const Root& root,
                     std::string_view path) {
  if (root.local()) CKPT_RETURN_IF_ERROR(CheckInside(directory, path));
  CKPT_ASSIGN_OR_RETURN(const auto file, root.Open(path));
  CKPT_ASSIGN_OR_RETURN(const FileIdentity identity, file->Identity());
  Blob blob;
  blob.root = root_index;
  blob.path = path;
  blob.stamp = identity.stamp;
  blob.mode = identity.access.mode;
  blob.uid = identity.access.uid;
  blob.gid = identity.access.gid;
  CKPT_ASSIGN_OR_RETURN(blob.fingerprint, FingerprintOf(*file));
  return blob;
}

// The directory below which the file's own path is `path`: the root's, unless the root shows
// several directories as one (UnionRoot).
Result<std::string> DirectoryOf(const Root& root, std::string_view path) {
  std::string real = root.PathOf(path);
  if (real == JoinPath(root.name(), path)) return root.name();
  if (!real.ends_with(StrCat("/", path))) {
    return Fail(ErrorCode::kUnsupported,
                StrCat(real, ": is not called '", path,
                       "': directories that are one step must have one name"));
  }
  real.resize(real.size() - path.size() - 1);
  return real;
}

struct Copy {
  std::vector<LocalTensor> locals;
  std::vector<FragmentSeries> series;
};

struct Building {
  std::vector<Copy> copies;
  bool average = false;
  bool replicas = false;
  bool settled = false;  // inline or cast
};

}  // namespace

struct Assembler::State {
  StepModel model;
  std::vector<std::shared_ptr<const Root>> roots;  // of the model, in its order
  std::vector<Building> building;                  // one per atom
  std::map<std::pair<uint32_t, std::string>, BlobIndex> blob_by_path;
  std::unordered_map<std::string, ParameterIndex> parameter_by_name;
  std::map<std::tuple<uint32_t, std::string, std::string>, AtomIndex> atom_by_kind;
  std::set<std::pair<ParameterIndex, std::string>> known_aliases;
  std::vector<std::string> defects;
  ProofBudget budget;

  Atom& atom(AtomIndex index) { return model.atoms[static_cast<uint32_t>(index)]; }
  Building& build(AtomIndex index) { return building[static_cast<uint32_t>(index)]; }

  Copy& CopyOf(AtomIndex index, uint32_t copy) {
    CKPT_CHECK(copy < (1u << 20));
    auto& copies = build(index).copies;
    if (copies.size() <= copy) copies.resize(copy + 1);
    return copies[copy];
  }

  std::string AtomName(const Atom& atom) const {
    return StrCat("'", model.parameter(atom.parameter).name, "' (", atom.kind, ")");
  }

  void Defect(std::string text) {
    if (defects.size() < 1000) defects.push_back(std::move(text));
  }

  void CheckFragment(AtomIndex index, const Fragment& fragment);
  void SettleGathers(size_t index);
  void CheckAtom(size_t index);
  void CheckNames();
};

Assembler::Assembler() : state_(std::make_unique<State>()) {}
Assembler::~Assembler() = default;
Assembler::Assembler(Assembler&&) noexcept = default;

StepModel& Assembler::header() { return state_->model; }

uint32_t Assembler::AddRoot(std::shared_ptr<const Root> root) {
  auto& names = state_->model.roots;
  const auto known = std::find(names.begin(), names.end(), root->name());
  const auto index = static_cast<uint32_t>(known - names.begin());
  if (known != names.end()) return index;
  names.push_back(root->name());
  state_->roots.push_back(std::move(root));
  return index;
}

Result<BlobIndex> Assembler::AddFile(uint32_t root, std::string_view relative_path) {
  CKPT_CHECK(root < state_->roots.size());
  CKPT_RETURN_IF_ERROR(CheckPlainPath(relative_path));
  CKPT_ASSIGN_OR_RETURN(const std::string directory,
                        DirectoryOf(*state_->roots[root], relative_path));
  const uint32_t home = AddDirectory(root, directory);
  const auto known = state_->blob_by_path.find({home, std::string(relative_path)});
  if (known != state_->blob_by_path.end()) return known->second;
  CKPT_ASSIGN_OR_RETURN(Blob blob, Inspect(home, directory, *state_->roots[root], relative_path));
  return AddBlob(std::move(blob));
}

// The root of the model that a directory of `root` is: `root`, unless it shows several as one.
uint32_t Assembler::AddDirectory(uint32_t root, const std::string& directory) {
  auto& names = state_->model.roots;
  const auto known = std::find(names.begin(), names.end(), directory);
  if (known != names.end()) return static_cast<uint32_t>(known - names.begin());
  names.push_back(directory);
  state_->roots.push_back(state_->roots[root]);
  return static_cast<uint32_t>(names.size() - 1);
}

bool Assembler::HasFile(uint32_t root, std::string_view relative_path) const {
  const auto directory = DirectoryOf(*state_->roots[root], relative_path);
  const auto& names = state_->model.roots;
  const auto home = std::find(names.begin(), names.end(), directory ? *directory : "");
  if (home == names.end()) return false;
  return state_->blob_by_path.contains(
      {static_cast<uint32_t>(home - names.begin()), std::string(relative_path)});
}

BlobIndex Assembler::AddBlob(Blob blob) {
  auto& blobs = state_->model.blobs;
  const auto [at, added] = state_->blob_by_path.try_emplace(
      {blob.root, blob.path}, BlobIndex{static_cast<uint32_t>(blobs.size())});
  if (added) blobs.push_back(std::move(blob));
  return at->second;
}

void Assembler::SetFrame(BlobIndex index, const Digest& frame) {
  state_->model.blobs[static_cast<uint32_t>(index)].frame = frame;
}

const Blob& Assembler::blob(BlobIndex index) const { return state_->model.blob(index); }

Result<ParameterIndex> Assembler::AddParameter(Parameter parameter) {
  auto& parameters = state_->model.parameters;
  const auto [at, added] = state_->parameter_by_name.try_emplace(
      parameter.name, ParameterIndex{static_cast<uint32_t>(parameters.size())});
  if (added) {
    CKPT_RETURN_IF_ERROR(CheckName(parameter.name));
    CKPT_RETURN_IF_ERROR(ElementCount(parameter.shape));
    CKPT_CHECK(NamesItsExpert(parameter));
    parameters.push_back(std::move(parameter));
    return at->second;
  }
  const Parameter& known = state_->model.parameter(at->second);
  if (known.shape != parameter.shape || known.role != parameter.role) {
    return Fail(ErrorCode::kInvalid,
                StrCat("parameter '", parameter.name, "' has shape ", ShapeToString(known.shape),
                       " in one file and ", ShapeToString(parameter.shape), " in another",
                       known.role == parameter.role ? "" : ", or its roles differ"));
  }
  return at->second;
}

ParameterIndex Assembler::parameter_count() const {
  return ParameterIndex{static_cast<uint32_t>(state_->model.parameters.size())};
}

Parameter& Assembler::parameter(ParameterIndex index) {
  return state_->model.parameters[static_cast<uint32_t>(index)];
}

Result<AtomIndex> Assembler::AddAtom(ParameterIndex parameter, std::string_view optimizer,
                                     std::string_view kind, DType dtype, Shape shape,
                                     Relation relation) {
  auto& atoms = state_->model.atoms;
  const auto [at, added] = state_->atom_by_kind.try_emplace(
      {static_cast<uint32_t>(parameter), std::string(optimizer), std::string(kind)},
      AtomIndex{static_cast<uint32_t>(atoms.size())});
  if (added) {
    CKPT_RETURN_IF_ERROR(CheckName(kind));
    CKPT_RETURN_IF_ERROR(ElementCount(shape));
    Atom atom;
    atom.parameter = parameter;
    atom.optimizer = optimizer;
    atom.kind = kind;
    atom.dtype = dtype;
    atom.shape = std::move(shape);
    atom.relation = relation;
    atoms.push_back(std::move(atom));
    state_->building.emplace_back();
    return at->second;
  }
  const Atom& known = state_->model.atom(at->second);
  if (known.dtype != dtype || known.shape != shape || known.relation != relation) {
    return Fail(ErrorCode::kInvalid,
                StrCat("atom ", state_->AtomName(known), " is ", DTypeName(known.dtype), " ",
                       ShapeToString(known.shape), " in one file and ", DTypeName(dtype), " ",
                       ShapeToString(shape), " in another"));
  }
  return at->second;
}

Status Assembler::SetInline(AtomIndex atom, std::string bytes, bool python_number) {
  Atom& target = state_->atom(atom);
  CKPT_ASSIGN_OR_RETURN(const uint64_t expected, ByteCount(target.shape, target.dtype));
  if (bytes.size() != expected) {
    return Fail(ErrorCode::kInvalid, StrCat("atom ", state_->AtomName(target), ": ", bytes.size(),
                                            " bytes, but its value has ", expected));
  }
  Building& building = state_->build(atom);
  if (building.settled && target.source.inline_bytes != bytes) {
    return Fail(ErrorCode::kInvalid,
                StrCat("atom ", state_->AtomName(target), " has two different values"));
  }
  target.source = InlineSource(std::move(bytes), python_number);
  building.settled = true;
  return {};
}

Status Assembler::SetCast(AtomIndex atom, AtomIndex of) {
  Atom& target = state_->atom(atom);
  const Atom& source = state_->atom(of);
  if (atom == of || target.shape != source.shape || !IsFloat(target.dtype) ||
      !IsFloat(source.dtype)) {
    return Fail(ErrorCode::kInvalid, StrCat("atom ", state_->AtomName(target),
                                            " cannot be a cast of ", state_->AtomName(source)));
  }
  target.source = CastSource(of);
  target.derived = true;
  state_->build(atom).settled = true;
  return {};
}

void Assembler::DeclareAverage(AtomIndex atom) { state_->build(atom).average = true; }
void Assembler::DeclareReplicas(AtomIndex atom) { state_->build(atom).replicas = true; }

uint32_t Assembler::AddLocal(AtomIndex atom, uint32_t copy, LocalTensor local) {
  auto& locals = state_->CopyOf(atom, copy).locals;
  locals.push_back(std::move(local));
  return static_cast<uint32_t>(locals.size() - 1);
}

void Assembler::SetLocal(AtomIndex atom, uint32_t copy, uint32_t local, LocalTensor tensor) {
  state_->CopyOf(atom, copy).locals.at(local) = std::move(tensor);
}

void Assembler::State::CheckFragment(AtomIndex index, const Fragment& fragment) {
  const Atom& of = atom(index);
  if (static_cast<uint32_t>(fragment.blob) >= model.blobs.size()) {
    return Defect(StrCat(AtomName(of), ": a fragment refers to a blob that does not exist"));
  }
  const Blob& blob = model.blob(fragment.blob);
  if (fragment.dtype != of.dtype) {
    return Defect(StrCat(AtomName(of), ": ", blob.path, " stores ", DTypeName(fragment.dtype),
                         ", but another file ", DTypeName(of.dtype)));
  }
  const uint64_t count = fragment.flat_end - fragment.flat_begin;
  const uint64_t width = std::max<uint64_t>(1, ByteWidth(fragment.dtype));
  if (fragment.flat_end < fragment.flat_begin || count > UINT64_MAX / width ||
      !RangeInside(fragment.offset, count * width, blob.stamp.size)) {
    Defect(StrCat(AtomName(of), ": elements [", fragment.flat_begin, ", ", fragment.flat_end,
                  ") at byte ", fragment.offset, " lie beyond the ", blob.stamp.size, " bytes of ",
                  blob.path));
  }
}

void Assembler::AddFragment(AtomIndex atom, uint32_t copy, uint32_t local,
                            const Fragment& fragment) {
  state_->CheckFragment(atom, fragment);
  if (fragment.flat_begin >= fragment.flat_end) return;
  auto& series = state_->CopyOf(atom, copy).series;
  if (!series.empty() && ExtendSeries(series.back(), local, fragment)) return;
  series.push_back(
      FragmentSeries{local, 1, fragment.flat_begin, 0, fragment.flat_end - fragment.flat_begin,
                     static_cast<uint32_t>(fragment.blob), 0, fragment.offset, 0, fragment.dtype});
}

void Assembler::AddAlias(std::string name, ParameterIndex parameter) {
  if (!state_->known_aliases.emplace(parameter, name).second) return;
  state_->model.aliases.push_back(Alias{std::move(name), parameter});
}

void Assembler::AddGroup(Group group) { state_->model.groups.push_back(std::move(group)); }

void Assembler::State::SettleGathers(size_t index) {
  Atom& of = model.atoms[index];
  Building& building_atom = building[index];
  if (building_atom.settled) {
    if (!building_atom.copies.empty()) {
      Defect(StrCat(AtomName(of), ": has both a value of its own and fragments"));
    }
    return;
  }
  for (Copy& copy : building_atom.copies) {
    NormaliseSeries(copy.series);
    copy.locals.shrink_to_fit();
    of.source.gathers.push_back(Gather{std::move(copy.locals), std::move(copy.series)});
  }
  building_atom.copies.clear();
  if (of.source.gathers.size() < 2) return;
  if (building_atom.average) {
    of.source = AverageSource(std::move(of.source.gathers));
  } else if (building_atom.replicas) {
    of.source = ReplicaSource(std::move(of.source.gathers));
  } else {
    Defect(StrCat(AtomName(of),
                  ": several ranks hold all of it, but nothing declares them equal "
                  "(--replicated) or to be averaged (--averaged)"));
  }
}

void Assembler::State::CheckAtom(size_t index) {
  const Atom& of = model.atoms[index];
  if (of.relation == Relation::kSame && of.shape != model.parameter(of.parameter).shape) {
    return Defect(StrCat(AtomName(of), ": shape ", ShapeToString(of.shape),
                         " contradicts the parameter's ",
                         ShapeToString(model.parameter(of.parameter).shape)));
  }
  if (!IsStoredInFiles(of.source)) return;
  if (of.source.gathers.empty()) {
    const auto count = ElementCount(of.shape);
    if (!count || *count > 0) Defect(StrCat(AtomName(of), ": no file holds it"));
    return;
  }
  for (const Gather& gather : of.source.gathers) {
    auto defect = FindCoverageDefect(gather, of.shape, budget);
    if (!defect) continue;
    std::string files;
    for (uint32_t blob : defect->blobs) {
      files += StrCat(files.empty() ? " (beside " : ", ", model.blobs[blob].path);
    }
    return Defect(StrCat(AtomName(of), ": ", defect->rule, files, files.empty() ? "" : ")"));
  }
}

void Assembler::State::CheckNames() {
  std::set<std::string_view> names;
  for (const Alias& alias : model.aliases) {
    if (!names.insert(alias.name).second) {
      Defect(StrCat("alias '", alias.name, "' stands for two parameters"));
    }
    if (parameter_by_name.count(alias.name) > 0) {
      Defect(StrCat("alias '", alias.name, "' is a parameter's own name too"));
    }
  }
  for (const Group& group : model.groups) {
    for (ParameterIndex index : group.parameters) {
      CKPT_CHECK(static_cast<uint32_t>(index) < model.parameters.size());
    }
  }
}

Result<StepModel> Assembler::Finish() && {
  State& state = *state_;
  for (size_t i = 0; i < state.model.atoms.size(); ++i) {
    state.SettleGathers(i);
    state.CheckAtom(i);
  }
  state.CheckNames();
  if (!state.defects.empty()) {
    std::string message;
    const size_t shown = std::min(kDefectsShown, state.defects.size());
    for (size_t i = 0; i < shown; ++i) {
      message += StrCat(message.empty() ? "" : "; ", state.defects[i]);
    }
    if (state.defects.size() > shown) {
      message += StrCat("; and ", state.defects.size() - shown, " more");
    }
    return Fail(ErrorCode::kInvalid, std::move(message));
  }
  if (state.model.mtime_ns == 0) {
    for (const Blob& blob : state.model.blobs) {
      state.model.mtime_ns = std::max(state.model.mtime_ns, blob.stamp.mtime_ns);
    }
  }
  StepModel model = std::move(state.model);
  state_.reset();
  model.BuildIndex();
  return model;
}

}  // namespace ckptfs
