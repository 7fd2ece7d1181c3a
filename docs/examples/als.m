% Alternating least squares for matrix completion, as a program of narrowcast: octave-cli als.m FOLDER
% Least squares of each row of left with right fixed, then of each row of right (Jain, Netrapalli and Sanghavi, STOC 2013).
folder = argv(){1};
entries = dlmread(fullfile(folder, "problem", "entries.csv"));
sizes = dlmread(fullfile(folder, "problem", "sizes.csv"));
rows = entries(:, 1) + 1; columns = entries(:, 2) + 1; values = entries(:, 3);

text = fileread(fullfile(folder, "parameters.csv"));
fields = textscan(text, "%s %f", "Delimiter", ",");
parameter = @(name) fields{2}(strcmp(fields{1}, name));
iterations = parameter("iterations"); rank = parameter("rank");

function factor = solved(other, own, fixed, values, count)
  factor = zeros(count, columns(other));
  for i = 1:count
    here = own == i;
    if any(here)
      factor(i, :) = (other(fixed(here), :) \ values(here))';
    end
  end
end

if exist(fullfile(folder, "state", "right.csv"), "file")
  left = dlmread(fullfile(folder, "state", "left.csv"));
  right = dlmread(fullfile(folder, "state", "right.csv"));
else
  left = zeros(sizes(1), rank);
  right = cos((1:sizes(2))' * (1:rank));
end
for iteration = 1:iterations
  left = solved(right, rows, columns, values, sizes(1));
  right = solved(left, columns, rows, values, sizes(2));
end
dlmwrite(fullfile(folder, "out", "left.csv"), left, "precision", "%.17g");
dlmwrite(fullfile(folder, "out", "right.csv"), right, "precision", "%.17g");
if iterations > 0
  residual = norm(sum(left(rows, :) .* right(columns, :), 2) - values) / norm(values);
  dlmwrite(fullfile(folder, "out", "report.csv"), [residual, 0], "precision", "%.17g");
end
