// SPDX-License-Identifier: Apache-2.0
//
// plan_oracle_tool: reads a case as JSON on standard input, makes the plan it
// describes, and writes the bytes of every asked range to standard output.
// test_plan_oracle.py builds the cases and knows the answers.

#include <stdio.h>

#include <iostream>
#include <nlohmann/json.hpp>

#include "core/base/strings.h"
#include "core/view/plan_reader.h"
#include "tests/support/stamp_of_file.h"

namespace ckptfs {
namespace {

using Json = nlohmann::json;

DType DTypeOf(const Json& json) { return DTypeFromName(json.get<std::string>()).value(); }

LocalTensor LocalOf(const Json& json) {
  LocalTensor local;
  local.shape = json["shape"].get<Shape>();
  for (const Json& item : json["pieces"]) {
    local.pieces.push_back(Piece{item["shape"], item["atom_begin"], item["local_offset"],
                                 item["local_strides"], item.value("scale", 1.0)});
  }
  return local;
}

Gather GatherOf(const Json& json) {
  Gather gather;
  for (const Json& item : json["locals"]) gather.locals.push_back(LocalOf(item));
  for (const Json& item : json["series"]) {
    FragmentSeries series;
    series.local = item["local"];
    series.count = item.value("count", 1u);
    series.flat_begin = item["flat_begin"];
    series.elements = item["elements"];
    series.flat_step = item.value("flat_step", uint64_t{0});
    series.blob = item["blob"];
    series.blob_step = item.value("blob_step", int64_t{0});
    series.offset = item["offset"];
    series.offset_step = item.value("offset_step", int64_t{0});
    series.dtype = DTypeOf(item["dtype"]);
    gather.series.push_back(series);
  }
  return gather;
}

Atom AtomOf(const Json& json) {
  Atom atom;
  atom.dtype = DTypeOf(json["dtype"]);
  atom.shape = json["shape"].get<Shape>();
  atom.source.kind = static_cast<SourceKind>(json["kind"].get<int>());
  for (const Json& item : json.value("gathers", Json::array())) {
    atom.source.gathers.push_back(GatherOf(item));
  }
  atom.source.of = AtomIndex{json.value("of", 0u)};
  for (unsigned byte : json.value("inline", std::vector<unsigned>{})) {
    atom.source.inline_bytes.push_back(static_cast<char>(byte));
  }
  return atom;
}

StepModel ModelOf(const Json& json) {
  StepModel model;
  model.roots = {json["root"].get<std::string>()};
  model.parameters.resize(1);
  for (const Json& name : json["blobs"]) {
    Blob blob;
    blob.path = name.get<std::string>();
    blob.stamp = StampOfFile(StrCat(model.roots[0], "/", blob.path)).value();
    model.blobs.push_back(blob);
  }
  for (const Json& item : json["atoms"]) model.atoms.push_back(AtomOf(item));
  return model;
}

int Run(const Json& json) {
  const StepModel model = ModelOf(json);
  PlanBuilder builder;
  builder.Literal(std::string(json["header"].get<size_t>(), 'H'));
  for (const Json& item : json["plan"]) {
    builder.Atom(AtomIndex{item["atom"].get<uint32_t>()},
                 std::make_shared<const LocalTensor>(LocalOf(item["local"])), item["begin"],
                 item["end"], DTypeOf(item["dtype"]));
  }
  const Plan plan = std::move(builder).Finish();
  const auto fail = [](const Error& error) {
    std::cerr << ErrorCodeName(error.code) << ": " << error.message << "\n";
    return 1;
  };
  if (const Status valid = plan.Validate(model); !valid) return fail(valid.error());
  const auto blobs = BlobReader::Create(model, {});
  const PlanReader reader(plan, model, *blobs);
  for (const Json& range : json["reads"]) {
    std::vector<std::byte> out(range[1].get<size_t>());
    const auto read = json.value("parallel", false) ? reader.ReadParallel(range[0], out)
                                                    : reader.Read(range[0], out);
    if (!read) return fail(read.error());
    if (*read > 0) fwrite(out.data(), 1, *read, stdout);
  }
  return 0;
}

}  // namespace
}  // namespace ckptfs

int main() { return ckptfs::Run(nlohmann::json::parse(std::cin)); }
