// SPDX-License-Identifier: Apache-2.0
#include "tests/core/store/sample_model.h"

#include <algorithm>

#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"
#include "core/tensor/piece.h"

namespace ckptfs::testing_support {
namespace {

Blob MakeBlob(std::string path, uint64_t size) {
  Blob blob;
  blob.path = std::move(path);
  blob.stamp = BlobStamp{size, 1700000000123456789, 1700000001000000000, 4711};
  blob.fingerprint = DigestOf(blob.path);
  blob.mode = 0640;
  blob.uid = 1000;
  blob.gid = 100;
  return blob;
}

Parameter MakeParameter(std::string name, Shape shape, Pattern pattern) {
  Parameter parameter;
  parameter.name = std::move(name);
  parameter.shape = std::move(shape);
  parameter.pattern = std::move(pattern);
  return parameter;
}

Atom MakeAtom(uint32_t parameter, std::string kind, DType dtype, Shape shape) {
  Atom atom;
  atom.parameter = ParameterIndex{parameter};
  atom.kind = std::move(kind);
  atom.dtype = dtype;
  atom.shape = std::move(shape);
  return atom;
}

// The whole tensor in one run of a blob.
Gather WholeGather(const Shape& shape, uint32_t blob, uint64_t offset, DType dtype) {
  FragmentSeries series;
  series.elements = *ElementCount(shape);
  series.flat_step = series.elements;
  series.blob = blob;
  series.offset = offset;
  series.dtype = dtype;
  return Gather{{WholeTensor(shape)}, {series}};
}

void AddParameters(StepModel& model) {
  Pattern vocab = Pattern::Shard(0);
  vocab.cuts[0].pad_multiple = 8;
  vocab.cuts[0].pad_always = true;
  vocab.cuts[0].unit = 2;
  model.parameters.push_back(MakeParameter("embed.weight", {6, 4}, vocab));
  model.parameters.back().stage = StageRule::kFirst;
  model.parameters.push_back(
      MakeParameter("layers.1.qkv.weight", {8, 4}, Pattern::Shard(0, {4, 2, 2})));
  model.parameters.back().stage = StageRule::kLayer;
  model.parameters.back().layer = 1;
  Pattern grid{PatternKind::kShard, {Cut{0}, Cut{1}}, {2, 2}, true};
  model.parameters.push_back(MakeParameter("experts.3.w", {4, 4}, grid));
  model.parameters.back().role = Role::kFrozen;
  model.parameters.back().expert = 3;
  model.parameters.back().expert_at = 8;
  model.parameters.push_back(MakeParameter("stacked", {4, 2}, Pattern::Replicate()));
  model.parameters.back().role = Role::kBuffer;
  model.parameters.back().stacked_experts = 4;
}

// Atom 0: two tensor-parallel ranks, each cut over two ZeRO ranks, with padding.
void AddCutAtom(StepModel& model) {
  Atom atom = MakeAtom(0, "master", DType::kF32, {6, 4});
  Gather gather;
  for (uint64_t rank = 0; rank < 2; ++rank) {
    gather.locals.push_back(*MakeLocalWithRows(
        Pattern{PatternKind::kShard, {Cut{0, {}, 8}}, {}, false}, {6, 4}, rank, 2, 4));
    FragmentSeries series;
    series.local = static_cast<uint32_t>(rank);
    series.count = 2;
    series.flat_step = 8;
    series.elements = 8;
    series.blob = static_cast<uint32_t>(rank);
    series.blob_step = 1;
    series.offset = 64 + rank * 32;
    series.offset_step = -16;
    gather.series.push_back(series);
  }
  atom.source.gathers = {gather};
  model.atoms.push_back(atom);
}

void AddAtoms(StepModel& model) {
  AddCutAtom(model);
  Atom cast = MakeAtom(0, "weight", DType::kBF16, {6, 4});
  cast.source.kind = SourceKind::kCast;
  cast.source.of = AtomIndex{0};
  cast.derived = true;
  model.atoms.push_back(cast);
  Atom replicas = MakeAtom(1, "exp_avg", DType::kF32, {8, 4});
  replicas.optimizer = "adam";
  replicas.source.kind = SourceKind::kReplicas;
  replicas.source.gathers = {WholeGather({8, 4}, 0, 0, DType::kF32),
                             WholeGather({8, 4}, 2, 128, DType::kF32)};
  model.atoms.push_back(replicas);
  Atom average = MakeAtom(2, "weight", DType::kBF16, {4, 4});
  average.source.kind = SourceKind::kAverage;
  average.source.gathers = {WholeGather({4, 4}, 0, 0, DType::kBF16),
                            WholeGather({4, 4}, 1, 0, DType::kBF16)};
  model.atoms.push_back(average);
  Atom step = MakeAtom(1, "step", DType::kF32, {});
  step.relation = Relation::kScalar;
  step.source.kind = SourceKind::kInline;
  step.source.inline_bytes = std::string("\0\0\xa0\x40", 4);
  step.source.python_number = true;
  model.atoms.push_back(step);
  Atom scales = MakeAtom(3, "scales", DType::kF32, {4, 1});
  scales.relation = Relation::kReduced;
  scales.source.gathers = {WholeGather({4, 1}, 2, 0, DType::kF32)};
  model.atoms.push_back(scales);
  Atom raw = MakeAtom(3, "quantised", DType::kF8E4M3, {4, 2});
  raw.source.gathers = {WholeGather({4, 2}, 2, 16, DType::kF8E4M3)};
  model.atoms.push_back(raw);
  Atom opaque = MakeAtom(3, "shampoo", DType::kU8, {16});
  opaque.relation = Relation::kOpaque;
  opaque.source.gathers = {WholeGather({16}, 1, 8, DType::kU8)};
  model.atoms.push_back(opaque);
}

}  // namespace

StepModel SampleModel() {
  StepModel model;
  model.framework = "deepspeed";
  model.framework_version = "0.19.7";
  model.id = "global_step5";
  model.iteration = 5;
  model.mtime_ns = 1700000000999999999;
  model.layout = *Layout::Parse("tp2_pp2_dp2_vpp2_zero2_bf16_split1-0-1-1_pipe");
  model.model_dtype = DType::kBF16;
  model.family = "llama_fused";
  model.layers = 3;
  model.roots = {"/checkpoints/run", std::string("/odd/\xff name")};
  model.blobs = {MakeBlob("a/model.pt", 256), MakeBlob("b.pt", 256), MakeBlob("c.pt", 256)};
  model.blobs[1].root = 1;
  model.blobs[1].store_owned = true;
  model.blobs[1].content = DigestOf("content");
  AddParameters(model);
  AddAtoms(model);
  model.aliases = {Alias{"lm_head.weight", ParameterIndex{0}}};
  model.groups = {
      Group{"adam", {ParameterIndex{1}, ParameterIndex{0}}, std::string("\x80\x02N.", 4)}};
  Document document;
  document.key = "client/args";
  document.scope = "dp0_tp1_pp0";
  document.pickle = std::string("\x80\x02\0.", 4);
  document.tensors = {StoredTensor{DType::kI64, {2, 3}, {3, 1}, BlobIndex{1}, 16}};
  model.documents = {document};
  model.notes = {"the weights are derived"};
  return model;
}

StepModel OwnedModel(const std::string& blobs) {
  StepModel model = SampleModel();
  model.roots[0] = StrCat(blobs, "/0123/global_step5");
  Blob& owned = model.blobs[0];
  owned.store_owned = true;
  owned.stamp = BlobStamp{owned.stamp.size, 0, 0, 0};
  owned.chunk_bytes = kChunkBytes;
  owned.chunks = {DigestOf("its only chunk")};
  return model;
}

StepModel LargeModel(uint32_t atoms, uint32_t ranks) {
  StepModel model;
  model.framework = "deepspeed";
  model.id = "global_step100000";
  model.layout.dp = ranks;
  model.layout.zero = 3;
  model.roots = {"/lustre/run"};
  const uint64_t elements = uint64_t{277} << 20;  // 1T parameters in 3,600 tensors
  const uint64_t slice = elements / ranks;
  const uint64_t size = 3 * slice * 4 * atoms + (1 << 20);
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    for (const char* what : {"model_states", "optim_states"}) {
      model.blobs.push_back(MakeBlob(
          StrCat("global_step100000/zero_pp_rank_", rank, "_mp_rank_00_", what, ".pt"), size));
    }
  }
  for (uint32_t p = 0; p < atoms; ++p) {
    Parameter parameter = MakeParameter(
        StrCat("model.layers.", p / 40, ".block.", p % 40, ".weight"), {elements}, Pattern{});
    model.parameters.push_back(parameter);
    uint64_t state = 0;
    for (const char* kind : {"master", "exp_avg", "exp_avg_sq"}) {
      Atom atom = MakeAtom(p, kind, DType::kF32, {elements});
      Gather gather;
      gather.locals = {WholeTensor({elements})};
      uint32_t width = 1;
      for (uint64_t first = 0, end = 10; first < ranks; first = end, end *= 10, ++width) {
        FragmentSeries series;
        series.count = static_cast<uint32_t>(std::min<uint64_t>(end, ranks) - first);
        series.flat_begin = first * slice;
        series.flat_step = slice;
        series.elements = slice;
        series.blob = static_cast<uint32_t>(2 * first + 1);
        series.blob_step = 2;
        series.offset = 4096 + 64 * width + (3 * uint64_t{p} + state) * slice * 4;
        gather.series.push_back(series);
      }
      atom.source.gathers = {gather};
      model.atoms.push_back(atom);
      ++state;
    }
  }
  return model;
}

StepModel TinyModel(const std::string& id, uint64_t iteration, int64_t mtime_ns, uint64_t seed) {
  StepModel model;
  model.framework = "test";
  model.id = id;
  model.iteration = iteration;
  model.mtime_ns = mtime_ns;
  model.roots = {"/somewhere"};
  model.notes = {StrCat("seed ", seed)};
  return model;
}

std::vector<std::string> NamesOf(const StepNews& news) {
  std::vector<std::string> names;
  for (const StepChange& change : news.changes) {
    names.push_back(StrCat(change.record ? "" : "-", change.id));
  }
  return names;
}

}  // namespace ckptfs::testing_support
